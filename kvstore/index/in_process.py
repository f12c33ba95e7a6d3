"""The plain twin of the Redis index: a dict in this process, for tests, simulation and single-process use."""

import time
from collections.abc import Callable, Mapping, Sequence

from kvstore.core import Key, Namespace, Tier
from kvstore.core.limits import INDEX_EXPIRY_S
from kvstore.index.base import Location, NodeRecord
from kvstore.wire import NodeId


class InProcessIndex:
    """An index that lives and dies with its process.

    Args:
        clock: seconds since 1970, or any clock that only grows; entries and heartbeats expire by it.
        expiry_s: how long an entry is believed after it was merged.
    """

    def __init__(self, clock: Callable[[], float] = time.time, expiry_s: float = INDEX_EXPIRY_S) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._entries: dict[Key, dict[NodeId, tuple[Tier, float]]] = {}
        self._nodes: dict[NodeId, tuple[NodeRecord, float]] = {}
        self._manifests: dict[Namespace, bytes] = {}
        self._seen: set[NodeId] = set()  # nodes that called since the last loss
        self._before: set[NodeId] = set()  # nodes that called before it and do not know yet

    async def lookup(self, keys: Sequence[Key]) -> list[tuple[Location, ...]]:
        """See `Index.lookup`."""
        found = await self.holders(keys)
        return found[: found.index(())] if () in found else found

    async def holders(self, keys: Sequence[Key]) -> list[tuple[Location, ...]]:
        """See `Index.holders`."""
        oldest = self._clock() - self._expiry_s
        return [
            tuple(
                Location(node, tier, int(at // 3600))
                for node, (tier, at) in self._entries.get(key, {}).items()
                if at > oldest
            )
            for key in keys
        ]

    async def merge(self, node: NodeId, states: Mapping[Key, Tier | None]) -> None:
        """See `Index.merge`."""
        now = self._clock()
        for key, tier in states.items():
            held = self._entries.setdefault(key, {})
            held.pop(node, None)  # so that the newest entry comes last
            if tier is not None:
                held[node] = (tier, now)
            if not held:
                del self._entries[key]
        if node not in self._before:
            self._seen.add(node)

    async def heartbeat(self, record: NodeRecord, expiry_s: float) -> bool:
        """See `Index.heartbeat`."""
        self._nodes[record.node] = (record, self._clock() + expiry_s)
        kept = record.node not in self._before
        self._before.discard(record.node)
        self._seen.add(record.node)
        return kept

    async def leave(self, node: NodeId) -> None:
        """See `Index.leave`."""
        self._nodes.pop(node, None)

    async def nodes(self) -> list[NodeRecord]:
        """See `Index.nodes`."""
        now = self._clock()
        self._nodes = {node: held for node, held in self._nodes.items() if held[1] > now}
        return [record for record, _ in self._nodes.values()]

    async def put_manifest(self, namespace: Namespace, manifest: bytes) -> None:
        """See `Index.put_manifest`."""
        self._manifests[namespace] = manifest

    async def manifest(self, namespace: Namespace) -> bytes | None:
        """See `Index.manifest`."""
        return self._manifests.get(namespace)

    async def close(self) -> None:
        """See `Index.close`."""

    def lose_everything(self) -> None:
        """Forgets all, as a flushed Redis does: a fault for tests and simulations."""
        self._entries.clear()
        self._nodes.clear()
        self._manifests.clear()
        self._before |= self._seen
        self._seen = set()
