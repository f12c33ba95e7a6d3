"""Whether the Redis of the configuration is one that a node can use."""

import re

from kvstore.core import BadConfiguration, IndexDown, IndexRefused
from kvstore.index import RedisIndex
from kvstore.node.settings import without_password

REDIS_VERSION_MIN = (6, 2)


async def refuse_wrong_redis(index: RedisIndex, url: str) -> None:
    """A Redis that does not answer is waited for while the node serves; one that answers as the wrong one would be
    waited for in vain.

    Raises:
        BadConfiguration: it is no Redis, too old, or does not know this user; one line with cause and remedy.
    """
    try:
        version = await index.version()
    except IndexRefused as error:
        raise BadConfiguration(f"redis.url: {error}") from error
    except IndexDown:
        return
    if too_old(version):
        raise BadConfiguration(
            f"redis.url: Redis at {without_password(url)} has version {version}, 6.2 or later is needed: "
            "upgrade it, or set another redis.url"
        )


def too_old(version: str) -> bool:
    """Whether a Redis of this version lacks what the index needs."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < REDIS_VERSION_MIN
