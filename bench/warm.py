"""How long a node takes to know again what is on a device: a start with many objects on it.

python bench/warm.py           a hundred thousand objects
python bench/warm.py --full    a million

The device is a sparse file with records and a catalog and without data: a start reads no data. Measured is what
`kvstore serve` does before it takes requests: the mount (catalog loaded, pages and slots counted) and the listing in
the store; and the same without a catalog, which reads all records.
"""

import asyncio
import gc
import hashlib
import resource
import shutil
import tempfile
import time
from pathlib import Path

from bench._harness import Report, Samples, Wrong, parse_arguments, run
from kvstore.core import Extent, Key, Manifest, limits
from kvstore.policy import PrefixLru
from kvstore.store import Porter, Store, Tiering
from kvstore.tiers import (
    Arena,
    FileDevice,
    Kind,
    NvmeConfig,
    NvmeDevice,
    NvmeTier,
    Record,
    format_device,
    mount,
)
from kvstore.wire import Generation

NODE = "warm"
PAGE_BYTES = 4 * limits.KIB
CHAIN = 64  # chunks of a prompt
BATCH = 4_096
MODEL = Manifest(
    weights="warm",
    model={},
    kv_dtype="bytes",
    tile_format="warm",
    chunk_tokens=16,
    unit_tokens=1,
    lanes=((32, 2, 4),),
)
OBJECT_BYTES = MODEL.geometry.object_bytes(16)


def fill(path: Path, catalogs: Path, count: int) -> None:
    """A device that says of itself that it has so many objects."""
    with path.open("wb") as file:
        file.truncate((count + 1_024) * (PAGE_BYTES + 4_096) + 2 * limits.MIB)
    device = FileDevice.open(str(path))
    format_device(device, NODE, PAGE_BYTES)
    volume = mount(device, NODE, catalogs).volume
    namespace = MODEL.namespace
    manifest = MODEL.encode()
    nothing = Generation(bytes(limits.GENERATION_BYTES))
    first = Record(
        kind=Kind.NAMESPACE,
        key=Key(namespace),
        namespace=namespace,
        parent=Key(bytes(limits.KEY_BYTES)),
        depth=0,
        generation=nothing,
        size_bytes=len(manifest),
        cold=False,
        sequence=volume.next_sequence(),
        slots=Extent(0, 1),
        extents=(),
    )
    volume.commit([(first, manifest)], [])
    table = bytes(8 * MODEL.geometry.num_runs)
    for start in range(0, count, BATCH):
        puts = [
            (record_of(number, volume.next_sequence()), table)
            for number in range(start, min(start + BATCH, count))
        ]
        volume.commit(puts, [])
    volume.close()


def record_of(number: int, sequence: int) -> Record:
    return Record(
        kind=Kind.OBJECT,
        key=key_of(number),
        namespace=MODEL.namespace,
        parent=key_of(number - 1) if number % CHAIN else Key(MODEL.namespace),
        depth=number % CHAIN,
        generation=Generation(number.to_bytes(8, "big")),
        size_bytes=OBJECT_BYTES,
        cold=False,
        sequence=sequence,
        slots=Extent(number + 1, 1),
        extents=(Extent(number, 1),),
    )


def key_of(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "big")).digest())


async def start(path: Path, catalogs: Path, count: int) -> tuple[float, float]:
    """Seconds to mount, and to list."""
    found: list[NvmeDevice] = []
    config = NvmeConfig(path=str(path), node=NODE, catalogs=catalogs)
    tier = NvmeTier([NvmeDevice(config, on_found=found.append)])
    arena = Arena.create(limits.MIB, PAGE_BYTES, huge_pages=False, lock=False)
    store = Store(arena.page_count, PAGE_BYTES, PrefixLru(), time.monotonic, tiering=Tiering(tier))
    porter = Porter(store, arena, tier, 10.0)
    gc.disable()  # as a node does for its start
    began_s = time.monotonic()
    await tier.devices[0].start(600.0)
    mounted_s = time.monotonic()
    porter.found(found[0])
    await porter.settled()
    listed_s = time.monotonic()
    gc.enable()
    if store.snapshot().totals.found != count:
        raise Wrong(f"{store.snapshot().totals.found} of {count} objects were found")
    await tier.stop()
    arena.close()
    return mounted_s - began_s, listed_s - mounted_s


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    count = 1_000_000 if arguments.full else 100_000
    report = Report("warm", "s")
    with tempfile.TemporaryDirectory() as folder:
        path, catalogs = Path(folder) / "device", Path(folder) / "catalogs"
        fill(path, catalogs, count)
        mounts, listings = zip(*(asyncio.run(start(path, catalogs, count)) for _ in range(3)), strict=True)
        shutil.rmtree(catalogs)
        rebuilt_s, relisted_s = asyncio.run(start(path, catalogs, count))
    warm = Samples(tuple(one + other for one, other in zip(mounts, listings, strict=True)))
    cold = Samples((rebuilt_s + relisted_s,))
    report.row(
        f"{count:,} objects",
        {"with catalog": warm, "from records": cold},
        against=("with catalog", "from records"),
    )
    report.note(
        f"of it {Samples(mounts).median:.2f} s to mount, {Samples(listings).median:.2f} s to list them in the store"
    )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    report.note(f"peak memory of the process, with the store's books twice: {peak_mib} MiB")
    report.aim("warm_start", warm.median, 30.0 * count / 1_000_000, "s", at_most=True)
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
