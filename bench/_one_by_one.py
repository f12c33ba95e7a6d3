"""One object at a time through every system of `bench/compare.py`, and hundreds of keys looked up at once."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from bench._harness import Report, Samples, Wrong, interleave
from bench._mooncake_store import MooncakeStore
from bench._raw_mooncake import RawMooncake
from bench.transfer import KIB, MIB, Bytes, manifest_of
from kvstore.client import Client, ClientConfig, KVStore, Put
from kvstore.core import Key, Namespace, chunk_key
from tests.support import RedisServer

OBJECT_BYTES = (256 * KIB, 4 * MIB)
TURNS = 100
KEYS = 512

Measure = Callable[[], float]


class Ours:
    """This store."""

    def __init__(self, store: KVStore, source: Bytes, target: Bytes) -> None:
        self._store = store
        self._source, self._target = source, target
        self._namespace: Namespace = store.open(manifest_of(source.nbytes))
        self._key: Key | None = None

    def put(self) -> float:
        """Milliseconds of storing a new object."""
        if self._key is not None:
            self._store.drop(self._namespace, [self._key])
        key = self._key = chunk_key(Key(self._namespace), list(os.urandom(8)))
        began = time.perf_counter()
        done = self._store.put_many(self._namespace, [Put(key, self._source)])
        taken_ms = 1e3 * (time.perf_counter() - began)
        if not all(done):
            raise Wrong("one object was not stored")
        return taken_ms

    def get(self) -> float:
        """Of reading the object that was put last."""
        assert self._key is not None, "something was put"
        self._target[:] = 0
        began = time.perf_counter()
        got = self._store.get_many(self._namespace, [self._key], [self._target])
        taken_ms = 1e3 * (time.perf_counter() - began)
        if got[0] is None or not np.array_equal(self._target, self._source):
            raise Wrong("one object did not come back")
        return taken_ms


class Blob:
    """Redis."""

    def __init__(self, server: RedisServer, source: Bytes, target: Bytes) -> None:
        self._client = server.client()
        self._source, self._target = source, target

    def put(self) -> float:
        """Milliseconds of a SET."""
        return _ms(lambda: self._client.set("one", self._source.data))

    def get(self) -> float:
        """Of a GET into the caller's memory."""

        def read() -> None:
            value = self._client.get("one")
            assert isinstance(value, bytes), "it was put"
            self._target[:] = np.frombuffer(value, np.uint8)

        return _ms(read)


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def _as_ms(ask_s: Callable[[int], float], size_bytes: int) -> Measure:
    return lambda: 1e3 * ask_s(size_bytes)


def systems(
    stores: Mapping[str, KVStore],
    peers: Mapping[str, MooncakeStore],
    raw: RawMooncake,
    server: RedisServer,
    source: Bytes,
    target: Bytes,
) -> dict[str, tuple[Measure, Measure]]:
    """What puts, and what gets, an object of the arrays' size."""
    size = source.nbytes
    ours = {name: Ours(store, source, target) for name, store in stores.items()}
    blob = Blob(server, source, target)
    copy = partial(_ms, partial(np.copyto, target, source))
    return {
        **{name: (one.put, one.get) for name, one in ours.items()},
        **{
            name: (_as_ms(peer.put_one_s, size), _as_ms(peer.get_one_s, size)) for name, peer in peers.items()
        },
        "raw": (_as_ms(raw.put_one_s, size), _as_ms(raw.get_one_s, size)),
        "redis": (blob.put, blob.get),
        "memcpy": (copy, copy),
    }


def latencies(
    stores: Mapping[str, KVStore],
    peers: Mapping[str, MooncakeStore],
    raw: RawMooncake,
    server: RedisServer,
    memory: tuple[Bytes, Bytes],
) -> Report:
    """One object at a time: half of them take longer than this, and one of a hundred."""
    report = Report("One object at a time, nothing else under way: 50th and 99th percentile", "ms")
    for size in OBJECT_BYTES:
        measured = systems(stores, peers, raw, server, *(array[:size] for array in memory))
        for at, what in enumerate(("put", "get")):
            samples = interleave({name: both[at] for name, both in measured.items()}, TURNS)
            for percentile in (50, 99):
                tail = {
                    name: Samples((float(np.percentile(some.values, percentile)),))
                    for name, some in samples.items()
                }
                report.row(f"{what} {size // KIB} KiB, p{percentile}", tail, against=("tcp", "mooncake"))
    report.note(f"of {TURNS} each, in turns")
    return report


def lookups(store: KVStore, control: str, peer: MooncakeStore, server: RedisServer) -> Report:
    """Hundreds of keys: ours are found, leased and given back; the others' are said to exist."""
    report = Report(f"{KEYS} keys looked up", "ms")
    namespace = store.open(manifest_of(64 * KIB))
    array = np.ones(64 * KIB, np.uint8)
    puts, parent = [], None
    for depth in range(KEYS):
        key = chunk_key(parent or Key(namespace), [depth])
        puts.append(Put(key, array, parent, depth))
        parent = key
    for start in range(0, len(puts), 64):
        if not all(store.put_many(namespace, puts[start : start + 64])):
            raise Wrong("small objects were not stored")
    keys = [put.key for put in puts]
    blobs, client = server.client(), Client(ClientConfig(node=control))
    blobs.mset(dict.fromkeys(keys, b""))

    async def ours_ms() -> float:
        began = time.perf_counter()
        promise = await client.acquire(namespace, keys, 10.0)
        taken_ms = 1e3 * (time.perf_counter() - began)
        await client.release(promise)
        if len(promise) != KEYS:
            raise Wrong(f"{len(promise)} of {KEYS} keys were found")
        return taken_ms

    with asyncio.Runner() as loop:
        loop.run(client.start())
        loop.run(client.open(manifest_of(64 * KIB)))
        samples = interleave(
            {
                "kvstore": lambda: loop.run(ours_ms()),
                "mooncake": lambda: 1e3 * peer.exist_s(KEYS),
                "redis": lambda: _ms(lambda: blobs.exists(*keys)),
            },
            20,
        )
        loop.run(client.close())
    report.row("all there", samples, against=("kvstore", "mooncake"))
    report.note(
        "ours are leased, too, and come with their places and tables; the others' are only said to exist"
    )
    return report
