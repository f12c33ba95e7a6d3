"""What fault tests share: objects whose bytes follow from their key, a client that can be interfered with, and a
look into the memory of a node.

Whoever reads an object knows what must be in it without having met its writer, so a wrong byte is found
wherever it comes from.
"""

import mmap
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from kvstore.client import (
    Client,
    ClientConfig,
    Exists,
    Grant,
    LoopThread,
    Mover,
    NodeAddress,
    Promise,
    PullItem,
    PullResult,
    PushItem,
    PushResult,
    Resident,
    Staging,
)
from kvstore.core import (
    Extent,
    Extents,
    Geometry,
    Key,
    Manifest,
    Namespace,
    Span,
    checksums,
    chunk_key,
    locate,
)
from kvstore.transfer import MooncakeTransfer, SharedMemoryTransfer, Transfer
from kvstore.wire import Committed, ReserveItem

T = TypeVar("T")
RUNS = 8
CHUNK_TOKENS = 16
HOUSE = random.Random(20)  # for choices that need not be repeated exactly: where a fault hits


def shape(object_bytes: int, name: str = "faults") -> Manifest:
    """A namespace of objects of this size, each of 8 runs."""
    return Manifest(
        weights=name,
        model={},
        kv_dtype="bytes",
        tile_format="faults",
        chunk_tokens=CHUNK_TOKENS,
        unit_tokens=1,
        lanes=((4, 2, object_bytes // (RUNS * CHUNK_TOKENS)),),
    )


def chain(namespace: Namespace, length: int, seed: int) -> list[Key]:
    """The keys of a prompt of so many chunks; another seed, another prompt."""
    keys: list[Key] = []
    for depth in range(length):
        keys.append(chunk_key(keys[-1] if keys else Key(namespace), [seed, depth]))
    return keys


def items(namespace: Namespace, keys: Sequence[Key], size_bytes: int) -> list[ReserveItem]:
    """What reserves the objects of a chain."""
    parents = [Key(namespace), *keys]
    return [ReserveItem(key, parents[depth], depth, size_bytes) for depth, key in enumerate(keys)]


def payload(key: Key, size_bytes: int) -> bytes:
    """The only right bytes of a key's object."""
    return np.random.Generator(np.random.SFC64(int.from_bytes(key[:16]))).bytes(size_bytes)


def extents_of(placed: Iterable[tuple[int, int]]) -> Extents:
    """Extents as the mover and the arena want them."""
    return tuple(Extent(*extent) for extent in placed)


def make_transfer(kind: str) -> Transfer:
    """The client's end of "mooncake" or "shm"."""
    return SharedMemoryTransfer() if kind == "shm" else MooncakeTransfer("127.0.0.1")


class Wrong(AssertionError):
    """A client was given bytes that are not the object's: the one thing that must never happen."""


class Engine:
    """A client of one namespace: what an engine does, step by step, over real Mooncake or real shared memory.

    Args:
        node: "host:port" of its node.
        manifest: of its namespace.
        timeout_s: for moving bytes.
        request_timeout_s: for one question to the node.
        kind: how bytes move, "mooncake" or "shm".
        transfer: in place of one of its own; stays the caller's.
    """

    def __init__(
        self,
        node: str,
        manifest: Manifest,
        *,
        timeout_s: float = 5.0,
        request_timeout_s: float = 1.0,
        kind: str = "mooncake",
        transfer: Transfer | None = None,
        staging_bytes: int = 64 << 20,
    ) -> None:
        self.namespace = manifest.namespace
        self.geometry: Geometry = manifest.geometry
        self.size_bytes = self.geometry.object_bytes(manifest.chunk_tokens)
        self.timeout_s = timeout_s
        self._kind = kind
        self._given = transfer
        self._manifest = manifest
        self._staging_bytes = staging_bytes
        self.client = Client(ClientConfig(node=node, request_timeout_s=request_timeout_s, probe_s_max=0.5))

    def __enter__(self) -> Self:
        self._loop = LoopThread("faults")
        self.run(self.client.start())
        self.run(self.client.open(self._manifest))
        self.transfer = self._given or make_transfer(self._kind)
        self.staging = Staging(self.transfer, self._staging_bytes)
        self.mover = Mover(self.transfer, self.staging)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.client.close())
        self._loop.stop()
        if self._given is None:
            self.transfer.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of the client."""
        return self._loop.run(work)

    # --- writing ------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[Key], duration_s: float = 30.0) -> tuple[Grant, ...]:
        return self.run(
            self.client.reserve(self.namespace, items(self.namespace, keys, self.size_bytes), duration_s)
        ).grants

    def push(
        self,
        address: NodeAddress,
        grants: Sequence[Grant],
        *,
        timeout_s: float = 0.0,
        first: Callable[[int], None] = lambda _: None,
        before: Callable[[int], None] = lambda _: None,
    ) -> list[PushResult]:
        """Writes what was granted; `first(n)` is called before the n-th object is made, `before(n)` before it is
        sent."""
        part = self.geometry.whole(self.size_bytes)

        def source(number: int, key: Key) -> Callable[[memoryview], None]:
            def fill(view: memoryview) -> None:
                first(number)
                view[:] = payload(key, self.size_bytes)
                before(number)

            return fill

        pushed = [
            PushItem(extents_of(grant.granted.extents), self.size_bytes, part, source(number, grant.item.key))
            for number, grant in enumerate(grants)
            if grant.granted is not None
        ]
        return self.mover.push(address, pushed, timeout_s or self.timeout_s)

    def commit(self, grants: Sequence[Grant], results: Sequence[PushResult]) -> list[Key]:
        """Commits what was written; the keys that the node acknowledged."""
        done = [(g, r.checksums) for g, r in zip(grants, results, strict=True) if r.ok and r.checksums]
        answers = self.run(self.client.commit(self.namespace, done))
        return [
            grant.item.key
            for (grant, _), answer in zip(done, answers, strict=True)
            if isinstance(answer, Committed)
        ]

    def abort(self, grants: Sequence[Grant], results: Sequence[PushResult]) -> None:
        """Gives back what was not written, as truthfully as an engine must."""
        for quiet in (True, False):
            lost = [g for g, r in zip(grants, results, strict=True) if not r.ok and r.quiet is quiet]
            if lost:
                self.run(self.client.abort(self.namespace, lost, quiet=quiet))

    def put(self, keys: Sequence[Key]) -> list[Key]:
        """Stores a chain; the keys that the node acknowledged, or has already."""
        grants = self.reserve(keys)
        there = [grant.item.key for grant in grants if isinstance(grant.answer, Exists)]
        given = [grant for grant in grants if grant.granted is not None]
        for address in {grant.address.boot: grant.address for grant in given if grant.address}.values():
            some = [grant for grant in given if grant.address == address]
            results = self.push(address, some)
            self.abort(some, results)
            there += self.commit(some, results)
        return there

    # --- reading ------------------------------------------------------------------------------------

    def acquire(self, keys: Sequence[Key], duration_s: float = 30.0) -> Promise:
        return self.run(self.client.acquire(self.namespace, keys, duration_s))

    def release(self, promise: Promise) -> None:
        self.run(self.client.release(promise))

    def pull(
        self, promise: Promise, *, timeout_s: float = 0.0, after: Callable[[int], None] = lambda _: None
    ) -> list[PullResult]:
        """Reads what was promised and compares; `after(n)` is called when the n-th object has been taken."""
        results: list[PullResult] = []
        part = self.geometry.whole(self.size_bytes)

        def sink(number: int, key: Key) -> Callable[[memoryview], None]:
            def take(view: memoryview) -> None:
                if view != payload(key, self.size_bytes):
                    raise Wrong(key.hex())
                after(number)

            return take

        by_node: dict[bytes, tuple[NodeAddress, list[PullItem]]] = {}
        for number, copy in enumerate(promise.copies):
            assert isinstance(copy.answer, Resident)
            pulled = PullItem(
                extents_of(copy.answer.extents),
                self.size_bytes,
                part,
                copy.answer.table,
                sink(number, copy.key),
            )
            by_node.setdefault(copy.address.boot, (copy.address, []))[1].append(pulled)
        for address, some in by_node.values():
            results += self.mover.pull(address, some, timeout_s or self.timeout_s)
        wrong = [result.error for result in results if "Wrong" in result.error]
        if wrong:
            raise Wrong(wrong[0])
        return results

    def get(self, keys: Sequence[Key]) -> int:
        """How many objects of a chain could be had, all of them right."""
        promise = self.acquire(keys)
        try:
            results = self.pull(promise)
            for copy, result in zip(promise.copies, results, strict=False):
                if result.corrupt:
                    self.run(self.client.suspect(self.namespace, copy))
            return sum(result.ok for result in results)
        finally:
            self.release(promise)

    def address(self) -> NodeAddress:
        """The present boot of its node, as its grants say it."""
        welcome = self.client.welcome
        assert welcome is not None
        grant = self.reserve(chain(self.namespace, 1, HOUSE.randrange(1 << 31)), 1.0)[0]
        self.run(self.client.abort(self.namespace, [grant], quiet=True))
        assert grant.address is not None, grant
        return grant.address


class HasPid(Protocol):
    """A process."""

    @property
    def pid(self) -> int: ...


class ArenaWindow:
    """The arena of a node process, as another process with the right to see it could change it."""

    def __init__(self, node: HasPid, page_bytes: int) -> None:
        folder = Path(f"/proc/{node.pid}/fd")
        self._fd = next(
            os.open(link, os.O_RDWR) for link in folder.iterdir() if "kvstore-arena" in os.readlink(link)
        )
        self._page_bytes = page_bytes
        self._map = mmap.mmap(self._fd, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        os.close(self._fd)

    def read(self, extents: Extents, size_bytes: int) -> bytes:
        """The bytes of an object."""
        places = locate(extents, self._page_bytes, (Span(0, size_bytes),))
        return b"".join(self._map[offset : offset + size] for offset, size in places)

    def write(self, extents: Extents, data: bytes) -> None:
        """Replaces the bytes of an object."""
        done = 0
        for offset, size in locate(extents, self._page_bytes, (Span(0, len(data)),)):
            self._map[offset : offset + size] = data[done : done + size]
            done += size

    def flip(self, extents: Extents, at: int) -> None:
        """Flips one bit of the byte at this offset of an object."""
        (place,) = locate(extents, self._page_bytes, (Span(at, 1),))
        self._map[place.offset_bytes] ^= 1 << (at % 8)


def fill(engine: Engine, arena: ArenaWindow, keys: Sequence[Key]) -> None:
    """Stores a chain as `Engine.put` does, but by the node's memory itself: for many small objects."""
    grants = engine.reserve(keys)
    runs = engine.geometry.runs(engine.size_bytes)
    done = []
    for grant in grants:
        assert grant.granted is not None, grant.answer
        data = payload(grant.item.key, engine.size_bytes)
        arena.write(extents_of(grant.granted.extents), data)
        done.append((grant, checksums(memoryview(data), runs)))
    answers = engine.run(engine.client.commit(engine.namespace, done))
    assert all(isinstance(answer, Committed) for answer in answers)
