"""A process to be killed: puts and deletes objects on a device, and says in one line each what it began and ended.

python -m tests.crash.writer DEVICE CATALOGS SEED      until it is killed
"""

import asyncio
import hashlib
import os
import random
import sys
from pathlib import Path

from kvstore.core import Key, Manifest, checksums
from kvstore.tiers import NewObject, NvmeConfig, NvmeDevice, Record, Refusal, aligned
from kvstore.wire import Generation

NODE = "crash"
PAGE_BYTES = 16_384
MANIFEST = Manifest(
    weights="w",
    model={},
    kv_dtype="bf16",
    tile_format="t",
    chunk_tokens=64,
    unit_tokens=1,
    lanes=((4, 4, 64),),
)
OBJECT_BYTES = MANIFEST.geometry.object_bytes(64)  # 64 KiB: four pages
WRITERS = 6


def object_bytes(generation: Generation) -> bytes:
    """The bytes of an object follow from its generation, so that another process can tell them."""
    return random.Random(generation).randbytes(OBJECT_BYTES)


def config_of(device: str, catalogs: str) -> NvmeConfig:
    return NvmeConfig(path=device, node=NODE, catalogs=Path(catalogs))


def say(word: str, key: Key, generation: Generation) -> None:
    os.write(1, f"{word} {key.hex()} {generation.hex()}\n".encode())


async def put(device: NvmeDevice, said: dict[Key, Record], key: Key, generation: Generation) -> None:
    data = object_bytes(generation)
    memory = aligned(OBJECT_BYTES)
    memory[:] = data
    table = checksums(memory, MANIFEST.geometry.runs(OBJECT_BYTES))
    new = NewObject(key, MANIFEST.namespace, key, 0, generation, OBJECT_BYTES, cold=False, table=table)
    say("putting", key, generation)
    stored = await device.put(new, [memory])
    if isinstance(stored, Record):
        say("put", key, generation)
        said[key] = stored
    else:
        assert stored in (Refusal.NO_ROOM, Refusal.BUSY)


def delete_some(device: NvmeDevice, said: dict[Key, Record], rng: random.Random) -> None:
    for record in rng.sample(list(said.values()), min(4, len(said))):
        say("deleting", record.key, record.generation)
        device.delete(said.pop(record.key))


async def write(device: NvmeDevice, said: dict[Key, Record], rng: random.Random, lane: int) -> None:
    """One of several writers, each with keys of its own."""
    while True:
        if rng.random() < 0.3 or device.refuses(OBJECT_BYTES) is not None:
            delete_some(device, said, rng)
        key = Key(hashlib.sha256(f"{lane} {rng.randrange(8)}".encode()).digest())
        if key not in device.records and device.refuses(OBJECT_BYTES) is None:
            await put(device, said, key, Generation(rng.randbytes(8)))
        await asyncio.sleep(0)


async def main(path: str, catalogs: str, seed: str) -> None:
    device = NvmeDevice(config_of(path, catalogs))
    await device.start()
    device.open_namespace(MANIFEST.namespace, MANIFEST.encode())
    said = dict(device.records)
    await asyncio.gather(*(write(device, said, random.Random(f"{seed} {n}"), n) for n in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
