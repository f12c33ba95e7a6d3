"""Many small objects, for benchmarks of the control plane: their bytes do not matter, so nobody writes them."""

import secrets
from collections.abc import Sequence

from bench._harness import Wrong
from kvstore.client import Client
from kvstore.core import Key, Manifest, limits
from kvstore.wire import Committed, ReserveItem

OBJECT_BYTES = 4096
MANIFEST = Manifest(
    weights="bench",
    model={},
    kv_dtype="bytes",
    tile_format="bench",
    chunk_tokens=16,
    unit_tokens=1,
    lanes=((32, 8, 1),),  # a table of 256 runs, as an 8B model's chunk has
)
NAMESPACE = MANIFEST.namespace
TABLE = bytes(limits.CHECKSUM_BYTES * MANIFEST.geometry.num_runs)


def random_keys(count: int) -> list[Key]:
    """Keys that nobody has seen."""
    data = secrets.token_bytes(count * limits.KEY_BYTES)
    return [Key(data[start : start + limits.KEY_BYTES]) for start in range(0, len(data), limits.KEY_BYTES)]


def items(keys: Sequence[Key], manifest: Manifest = MANIFEST) -> list[ReserveItem]:
    """What reserves these objects: a chain of nobody's."""
    root, size_bytes = Key(manifest.namespace), manifest.geometry.object_bytes(manifest.chunk_tokens)
    return [ReserveItem(key, root, 0, size_bytes) for key in keys]


async def store(
    client: Client,
    keys: Sequence[Key],
    batch_keys: int = limits.BATCH_KEYS_MAX,
    manifest: Manifest = MANIFEST,
) -> None:
    """Has objects of these keys stored, so many at a time.

    Raises:
        Wrong: one was not.
    """
    namespace, table = manifest.namespace, bytes(limits.CHECKSUM_BYTES * manifest.geometry.num_runs)
    for start in range(0, len(keys), batch_keys):
        batch = keys[start : start + batch_keys]
        grants = (await client.reserve(namespace, items(batch, manifest), 60.0)).granted
        answers = await client.commit(namespace, [(grant, table) for grant in grants])
        if len(grants) < len(batch) or not all(isinstance(answer, Committed) for answer in answers):
            raise Wrong(f"{len(batch)} objects were offered, {len(grants)} granted")
