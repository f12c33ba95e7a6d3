"""The index in Redis: standalone, Sentinel or Cluster, version 6.2 or later.

`layout` says what is stored and why writes are numbered; `link` is the seam to redis-py. Reads are one
`MGET` per round trip, cut on the client; writes run a script that changes one node's entries and leaves
the others' alone. In a Cluster both go out grouped by hash tag, still in one round trip per server.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from kvstore.core import Key, Namespace, Tier, namespace_of
from kvstore.core.limits import INDEX_BATCH_KEYS_MAX, INDEX_EXPIRY_S, INDEX_FIRST_KEYS
from kvstore.index import layout
from kvstore.index.address import parse
from kvstore.index.base import Location, NodeRecord
from kvstore.index.link import Command, Link
from kvstore.wire import NodeId

NODE_FORGOTTEN_S: Final = 3_600  # a node without heartbeat for so long leaves the list of nodes
MANIFEST_EXPIRY_S: Final = 7 * 86_400
REFUSALS_MAX: Final = 4  # of one write in a row, before the caller is told

_Group = list[tuple[Key, Tier | None]]


class RedisIndex:
    """Where keys are, kept in Redis. Belongs to one event loop; connects when first used, and again.

    Args:
        link: connections to Redis.
        expiry_s: how long an entry lives after its node last published it.
    """

    def __init__(self, link: Link, expiry_s: int = INDEX_EXPIRY_S) -> None:
        self._link = link
        self._expiry_s = expiry_s
        self._sequence = 0  # of the last write that was sent
        self._written: dict[bytes, int] = {}  # fence -> sequence of the last write that was answered
        self._lost: set[NodeId] = set()  # nodes whose writes the index has lost, not yet told

    @classmethod
    def connect(cls, url: str, timeout_s: float = 1.0, expiry_s: int = INDEX_EXPIRY_S) -> "RedisIndex":
        """An index over the Redis at `url` (see `address`). Does no I/O: Redis may come up later.

        Args:
            url: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.
            timeout_s: what any call takes at most.
            expiry_s: how long an entry lives after its node last published it, in whole seconds.

        Raises:
            BadConfiguration: the URL cannot be read.
        """
        return cls(Link(parse(url), timeout_s), expiry_s)

    async def lookup(self, keys: Sequence[Key]) -> list[tuple[Location, ...]]:
        """See `Index.lookup`."""
        async with self._link.deadline():
            found = await self._locations(keys[:INDEX_FIRST_KEYS])
            if len(found) == INDEX_FIRST_KEYS < len(keys):
                found += await self._locations(keys[INDEX_FIRST_KEYS:])
        return found

    async def holders(self, keys: Sequence[Key]) -> list[tuple[Location, ...]]:
        """See `Index.holders`."""
        async with self._link.deadline():
            return [layout.decode(value) for value in await self._values(keys)] if keys else []

    async def _locations(self, keys: Sequence[Key]) -> list[tuple[Location, ...]]:
        found = []
        for value in await self._values(keys) if keys else ():
            locations = layout.decode(value)
            if not locations:
                break
            found.append(locations)
        return found

    async def _values(self, keys: Sequence[Key]) -> list[bytes | None]:
        names = [layout.key_name(key) for key in keys]
        if not self._link.partitioned:
            values: list[bytes | None] = (await self._link.call([("MGET", *names)]))[0]
            return values
        places: dict[int, list[int]] = {}
        for at, key in enumerate(keys):
            places.setdefault(layout.partition(key), []).append(at)
        replies = await self._link.call([("MGET", *(names[at] for at in group)) for group in places.values()])
        values = [None] * len(keys)
        for group, reply in zip(places.values(), replies, strict=True):
            for at, value in zip(group, reply, strict=True):
                values[at] = value
        return values

    async def merge(self, node: NodeId, states: Mapping[Key, Tier | None]) -> None:
        """See `Index.merge`."""
        left = iter(states.items())
        async with self._link.deadline():
            while batch := list(islice(left, INDEX_BATCH_KEYS_MAX)):
                await self._write(node, self._groups(batch), [])

    def _groups(self, batch: _Group) -> dict[int | None, _Group]:
        """The batch by partition; one group under None where Redis is not partitioned."""
        if not self._link.partitioned:
            return {None: batch}
        groups: dict[int | None, _Group] = {}
        for key, tier in batch:
            groups.setdefault(layout.partition(key), []).append((key, tier))
        return groups

    async def _write(self, node: NodeId, groups: dict[int | None, _Group], along: list[Command]) -> None:
        """Runs the merge script on every group; `along` are commands to send in the same round trip.

        A refused number is not above the fence: another process wrote as this node (its last boot, with
        a clock ahead of ours), or two writes of ours have overtaken each other. Then the fence's number
        is adopted and the refused groups are sent again.
        """
        for _ in range(REFUSALS_MAX):
            self._sequence = sequence = max(self._sequence + 1, time.time_ns() // 1_000)
            fences = {layout.fence_name(node, number): number for number in groups}
            floors = {fence: self._written.get(fence, 0) for fence in fences}
            scripts = [self._merge(fence, node, sequence, groups[number]) for fence, number in fences.items()]
            replies = (await self._link.call([*along, *scripts]))[len(along) :]
            along = []
            for fence, last in zip(fences, replies, strict=True):
                if last < floors[fence]:
                    self._lost.add(node)
                if last >= sequence:
                    self._sequence = max(self._sequence, last)
                    continue
                self._written[fence] = max(sequence, self._written.get(fence, 0))
                del groups[fences[fence]]
            if not groups:
                return
        raise self._link.down(
            f"the writes of node {node.hex()} are refused as outdated; does another process use its id"
        )

    def _merge(self, fence: bytes, node: NodeId, sequence: int, group: _Group) -> Command:
        names = [layout.key_name(key) for key, _ in group]
        tiers = layout.tier_bytes([tier for _, tier in group])
        script = layout.MERGE.sha
        return ("EVALSHA", script, 1 + len(names), fence, *names, node, sequence, self._expiry_s, tiers)

    async def heartbeat(self, record: NodeRecord, expiry_s: float) -> bool:
        """See `Index.heartbeat`. Touches every fence of the node, so a loss is seen within a heartbeat."""
        node = record.node
        data = msgspec.json.encode(record)
        announce: list[Command] = [
            ("SET", layout.node_name(node), data, "PX", max(1, int(expiry_s * 1_000))),
            ("EVALSHA", layout.ENROL.sha, 1, layout.NODES, node, NODE_FORGOTTEN_S),
        ]
        numbers: Iterator[int | None] = iter(range(layout.PARTITIONS) if self._link.partitioned else [None])
        async with self._link.deadline():
            await self._write(node, {number: [] for number in numbers}, announce)
        kept = node not in self._lost
        self._lost.discard(node)
        return kept

    async def leave(self, node: NodeId) -> None:
        """See `Index.leave`."""
        await self._link.call([("DEL", layout.node_name(node)), ("ZREM", layout.NODES, node)])

    async def nodes(self) -> list[NodeRecord]:
        """See `Index.nodes`. A damaged record is no record."""
        async with self._link.deadline():
            (ids,) = await self._link.call([("ZRANGE", layout.NODES, 0, -1)])
            if not ids:
                return []
            names = [layout.node_name(NodeId(node)) for node in ids]
            if self._link.partitioned:
                values = [value for (value,) in await self._link.call([("MGET", name) for name in names])]
            else:
                (values,) = await self._link.call([("MGET", *names)])
        return [record for value in values if (record := _record(value))]

    async def put_manifest(self, namespace: Namespace, manifest: bytes) -> None:
        """See `Index.put_manifest`. Forgotten after a week without being put again."""
        await self._link.call([("SET", layout.manifest_name(namespace), manifest, "EX", MANIFEST_EXPIRY_S)])

    async def manifest(self, namespace: Namespace) -> bytes | None:
        """See `Index.manifest`. Bytes that do not hash to `namespace` are none."""
        ((value,),) = await self._link.call([("MGET", layout.manifest_name(namespace))])
        return value if value is not None and namespace_of(value) == namespace else None

    async def version(self) -> str:
        """Which Redis it is; of a cluster, the oldest that was asked.

        Raises:
            IndexDown
        """
        (about,) = await self._link.call([("INFO", "server")])
        nodes = [about] if "redis_version" in about else list(about.values())
        return min((str(node["redis_version"]) for node in nodes), key=lambda text: text.split("."))

    async def close(self) -> None:
        """See `Index.close`."""
        await self._link.close()


def _record(value: bytes | None) -> NodeRecord | None:
    try:
        return msgspec.json.decode(value, type=NodeRecord) if value else None
    except msgspec.DecodeError:
        return None  # foreign or damaged: the node's next heartbeat replaces it
