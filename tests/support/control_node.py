"""A node of real parts in this process: store, arena, mover and control endpoint, on the test's loop.

Bytes move by an `InProcessNetwork`. What the node room adds (heartbeats, a publisher, ticks) is a method here,
called when the test says so.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from secrets import token_bytes

from kvstore.core import Key, Manifest, Tier, chunk_key
from kvstore.index import Index, NodeRecord
from kvstore.policy import Lru
from kvstore.server import ControlServer
from kvstore.store import Mover, Store
from kvstore.tiers import Arena
from kvstore.transfer import InProcessNetwork, InProcessTransfer
from kvstore.wire import BootId, NodeId, ReserveItem, Welcome

PAGE_BYTES = 16 << 10
ARENA_BYTES = 4 << 20
MANIFEST = Manifest(
    weights="sha256:0011",
    model={"architecture": "Test", "num_layers": 2},
    kv_dtype="float32",
    tile_format="token-major",
    chunk_tokens=16,
    unit_tokens=1,
    lanes=((2, 2, 512),),
)
NAMESPACE = MANIFEST.namespace
OBJECT_BYTES = MANIFEST.geometry.object_bytes(MANIFEST.chunk_tokens)  # 32 KiB: two pages, four runs
TABLE = bytes(8 * MANIFEST.geometry.num_runs)


def chain(length: int, seed: int = 0) -> list[Key]:
    """The keys of a prompt of so many chunks; another seed, another prompt."""
    keys: list[Key] = []
    parent = Key(NAMESPACE)
    for depth in range(length):
        parent = chunk_key(parent, [seed * 100_000 + depth] * MANIFEST.chunk_tokens)
        keys.append(parent)
    return keys


def items(keys: list[Key]) -> list[ReserveItem]:
    """What reserves the objects of a chain."""
    parents = [Key(NAMESPACE), *keys]
    return [ReserveItem(key, parents[depth], depth, OBJECT_BYTES) for depth, key in enumerate(keys)]


class ControlNode:
    """One boot of a node. `start` and `stop` may be repeated: every start is a new boot on the same port."""

    def __init__(
        self,
        network: InProcessNetwork | None = None,
        *,
        name: bytes = b"node-one",
        arena_bytes: int = ARENA_BYTES,
        token: bytes = b"",
        listen: str = "127.0.0.1:0",
        index_url: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = NodeId(name)
        self.network = network or InProcessNetwork()
        self.address = listen
        self.store: Store
        self.server: ControlServer
        self._arena_bytes = arena_bytes
        self._token = token
        self._index_url = index_url
        self._clock = clock

    async def start(self) -> None:
        self.boot = BootId(token_bytes(8))
        self.arena = Arena.create(self._arena_bytes, PAGE_BYTES, huge_pages=False, lock=False)
        self.transfer = InProcessTransfer(self.network, f"arena-{self.boot.hex()}")
        self.transfer.register(self.arena.address, self.arena.size_bytes)
        self.store = Store(self.arena.page_count, PAGE_BYTES, Lru(), self._clock)
        self.mover = Mover(self.store, self.arena)
        self.server = ControlServer(
            self.store,
            self.mover,
            self._welcome,
            boot=self.boot,
            listen=self.address,
            token=self._token,
            clock=self._clock,
        )
        await self.server.start()
        self.address = self.server.address

    async def stop(self) -> None:
        await self.server.stop()
        self.mover.close()
        self.transfer.close()
        self.store.audit()
        self.arena.close()

    async def die(self) -> None:
        """As `kill -9` looks from outside: connections are reset, nothing is answered. `start` brings it back."""
        endpoint = self.server._endpoint
        endpoint.stop_reading()
        for peer in endpoint._peers:
            peer.abort()
        await self.stop()

    async def publish(self, index: Index) -> None:
        """Heartbeat and keys, as the node's publisher would send them."""
        record = NodeRecord(
            node=self.node,
            boot=self.boot,
            control=self.address,
            free_bytes=self.store.snapshot().tiers[Tier.DRAM].free_pages * PAGE_BYTES,
            arena_bytes=self.arena.size_bytes,
        )
        await index.heartbeat(record, 60.0)
        await index.merge(self.node, dict.fromkeys(self.store.keys(), Tier.DRAM))

    def _welcome(self) -> Welcome:
        return Welcome(
            node=self.node,
            versions=(),
            page_bytes=PAGE_BYTES,
            arena_base=self.arena.address,
            arena_bytes=self.arena.size_bytes,
            transfer={self.transfer.protocol: self.transfer.segment},
            index_url=self._index_url,
        )


@asynccontextmanager
async def running(node: ControlNode) -> AsyncIterator[ControlNode]:
    """A node while it runs; at its end its books are audited."""
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def eventually(ask: Callable[[], Awaitable[object]], deadline_s: float = 10.0) -> None:
    """As `wait_until_async`, for a question that is itself asked with await."""
    async with asyncio.timeout(deadline_s):
        while not await ask():  # noqa: ASYNC110 -- there is no event for "a node of another process is back"
            await asyncio.sleep(0.005)
