"""Real Redis servers for the index, each started once; and clients that are closed again."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvstore.index import RedisIndex
from tests.index.servers import Cluster, SentinelGroup
from tests.support import RedisServer

Connect = Callable[..., RedisIndex]


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def redis_sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    with SentinelGroup(tmp_path_factory.mktemp("sentinel")) as group:
        yield group


@pytest.fixture
def own_redis(tmp_path) -> Iterator[RedisServer]:
    """A Redis of this test alone, to be paused, killed and filled with rubbish."""
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes clients of an index and closes them at the end."""
    made: list[RedisIndex] = []

    def make(url: str, timeout_s: float = 10.0, expiry_s: int = 3_600) -> RedisIndex:
        made.append(RedisIndex.connect(url, timeout_s, expiry_s))
        return made[-1]

    yield make
    for index in made:
        await index.close()
