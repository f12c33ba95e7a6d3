"""The one seam to redis-py: commands go out, replies come back, foreign errors end here.

A link sends a batch of commands in one round trip (to every server involved) and answers one reply per
command. It bounds every batch in time and the batches in number, reconnects by itself, and turns
everything that says "Redis cannot be used" into `IndexDown`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import hiredis
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from kvstore.core import IndexDown, IndexRefused
from kvstore.index.address import RedisAddress
from kvstore.index.layout import SCRIPTS

Command = tuple[str | bytes | int, ...]

CALLS_AT_ONCE_MAX: Final = 32  # connections per process: more callers wait, within their time-out

_COST: Final = "until it is back, keys are neither found nor published here; nothing that is stored is lost"
_REMEDIES: Final[tuple[tuple[type[Exception], type[IndexDown], str], ...]] = (
    (AuthenticationError, IndexRefused, "check user and password in redis.url"),
    (AuthorizationError, IndexRefused, "check user and password in redis.url"),
    (InvalidResponse, IndexRefused, "something else listens there; check host and port in redis.url"),
    (
        NoPermissionError,
        IndexDown,
        "allow this user ~kv:* +@read +@write +@scripting +info (redis-cli ACL SETUSER)",
    ),
    (
        OutOfMemoryError,
        IndexDown,
        "raise its maxmemory, or set maxmemory-policy allkeys-lru: the index may be evicted",
    ),
    (ReadOnlyError, IndexDown, "redis.url names a replica; name the primary, or use redis+sentinel://"),
    (ClusterError, IndexDown, "check `redis-cli cluster info` on its nodes"),
    (
        RedisClusterException,
        IndexDown,
        "check that its nodes run, and `redis-cli cluster info` on them",
    ),
    (
        MasterNotFoundError,
        IndexDown,
        "check the Sentinels' addresses and the service: redis-cli -p 26379 sentinel masters",
    ),
    (Exception, IndexDown, "check that it runs and can be reached from this machine"),
)


class _FastPack(AbstractConnection):
    """Encodes a lookup in 5 microseconds, a merge in 30: redis-py takes half a microsecond per key and more."""

    def pack_command(self, *args: Any) -> list[bytes]:
        if args[0] == "MGET" and len(set(map(len, args[1:]))) == 1:
            each = b"\r\n$%d\r\n" % len(args[1])
            return [b"*%d\r\n$4\r\nMGET%b%b\r\n" % (len(args), each, each.join(args[1:]))]
        if args[0] == "EVALSHA":
            return [hiredis.pack_command(args)]
        packed: list[bytes] = super().pack_command(*args)
        return packed


class _Plain(_FastPack, Connection):
    pass


class _Tls(_FastPack, SSLConnection):
    pass


class _Unix(_FastPack, UnixDomainSocketConnection):
    pass


class _Managed(_FastPack, SentinelManagedConnection):
    pass


class _ManagedTls(_FastPack, SentinelManagedSSLConnection):
    pass


class Link:
    """Connections to one Redis, Sentinel group or Cluster. Belongs to one event loop.

    Args:
        address: where it is.
        timeout_s: what any batch takes at most.
    """

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.partitioned = address.kind == "cluster"
        self._address = address
        self._sentinel: Sentinel | None = None
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE_MAX)
        self._client = self._open()

    def _open(self) -> "Redis | RedisCluster":
        address = self._address
        options: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "protocol": 2,
            "socket_timeout": None,  # the whole batch is bounded, and a timer per read is dear
            "retry": Retry(NoBackoff(), 1),  # a connection that died in the pool costs one more try
        }
        options |= {name: value for name, value in address.options.items() if name.startswith("ssl_")}
        if address.kind == "unix":
            return Redis.from_pool(
                ConnectionPool(connection_class=_Unix, path=address.path, db=address.db, **options)
            )
        options["socket_connect_timeout"] = self.timeout_s
        if address.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in address.hosts]
            return RedisCluster(startup_nodes=nodes, ssl=address.tls, **options)
        options["db"] = address.db
        if address.kind == "sentinel":
            return self._open_sentinel(options)
        host, port = address.hosts[0]
        plain = _Tls if address.tls else _Plain
        return Redis.from_pool(ConnectionPool(connection_class=plain, host=host, port=port, **options))

    def _open_sentinel(self, options: dict[str, Any]) -> Redis:
        asking: dict[str, Any] = {
            "username": self._address.options.get("sentinel_username"),
            "password": self._address.options.get("sentinel_password"),
            "socket_timeout": self.timeout_s / 3,  # so that the next Sentinel can be asked when one hangs
            "socket_connect_timeout": self.timeout_s / 3,
            "retry": Retry(NoBackoff(), 0),
        }
        sentinel_class: Any = Sentinel  # redis-py leaves these two without types
        pool_class: Any = SentinelConnectionPool
        self._sentinel = sentinel_class(self._address.hosts, sentinel_kwargs=asking)
        managed = _ManagedTls if self._address.tls else _Managed
        pool = pool_class(self._address.service, self._sentinel, connection_class=managed, **options)
        return Redis.from_pool(pool)

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Sends the commands together and answers their replies, in order.

        A script that Redis does not know (any more) is sent again with its text.

        Raises:
            IndexDown: Redis is not there, refuses a command, or did not answer within `timeout_s`.
        """
        async with self.deadline(), self._slots:
            replies = await self._send(commands)
            unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if unknown:
                texts = [("EVAL", SCRIPTS[str(commands[at][1])], *commands[at][2:]) for at in unknown]
                for at, reply in zip(unknown, await self._send(texts), strict=True):
                    replies[at] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise self.down(reply) from reply
        return replies

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await self._client.execute_command(*commands[0])]
            except ResponseError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute(raise_on_error=False))

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Bounds several batches together by `timeout_s`, and maps what goes wrong inside."""
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except TimeoutError as error:
            raise self.down(f"did not answer within {self.timeout_s:g} s") from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise self.down(error) from error
        except (
            TypeError,
            ValueError,
            LookupError,
        ) as error:  # something between us and Redis has an idea of its own
            raise self.down(f"answered as no Redis does ({type(error).__name__}: {error})") from error

    def down(self, why: Exception | str) -> IndexDown:
        """The error that says Redis cannot be used, what that costs and what to do."""
        known = why if isinstance(why, Exception) else Exception(why)
        error, remedy = next(row[1:] for row in _REMEDIES if isinstance(known, row[0]))
        said = " ".join(str(why).split()).rstrip(".") or type(why).__name__
        if isinstance(why, MasterNotFoundError):  # redis-py says it with the inside of all its clients
            said = f"no Sentinel answers with a primary of {self._address.service!r}"
        what = f"Redis at {self._address.shown}: {said}"
        return error(f"{what}; {_COST}; {remedy}")

    async def close(self) -> None:
        """Gives the connections back. Takes at most `timeout_s`, also when Redis hangs."""
        async with self.deadline():
            await self._client.aclose()
            for sentinel in self._sentinel.sentinels if self._sentinel else ():
                await sentinel.aclose()
