"""Flips a bit of one object in the memory of a running node."""

from pathlib import Path

from kvstore.client import KVStore, Resident
from kvstore.core import Key, Manifest, Namespace


def objects_by_kind(control: str, views: list[dict[str, object]]) -> dict[int, list[Key]]:
    """The keys of a node's objects (as /v1/objects shows them), by kind; of one namespace."""
    [name] = {str(view["namespace"]) for view in views}
    namespace = Namespace(bytes.fromhex(name))
    found: dict[int, list[Key]] = {}
    with KVStore(control) as store:
        manifest = store.manifest(namespace)
        assert manifest is not None, "the index has lost the namespace"
        store.open(manifest)
        for view in views:
            key = Key(bytes.fromhex(str(view["key"])))
            promise = store._loop.run(store._client.acquire(namespace, [key], 5.0))
            answer = promise.copies[0].answer
            assert isinstance(answer, Resident)
            found.setdefault(kind_of(manifest, answer.size_bytes, len(answer.table)), []).append(key)
            store._loop.run(store._client.release(promise))
    return found


def kind_of(manifest: Manifest, size_bytes: int, table_bytes: int) -> int:
    """Of which kind an object is, by its size and table."""
    geometry = manifest.object_kinds.geometry_of(size_bytes, table_bytes)
    assert geometry is not None, "no object is like that"
    return manifest.object_kinds.geometries.index(geometry)


def flip(control: str, pid: int, namespace: Namespace, keys: list[Key]) -> None:
    """A bit in the middle of the first page of each of these objects."""
    with KVStore(control) as store, Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        manifest = store.manifest(namespace)
        assert manifest is not None, "the index has lost the namespace"
        store.open(manifest)
        for key in keys:
            promise = store._loop.run(store._client.acquire(namespace, [key], 5.0))
            answer, address = promise.copies[0].answer, promise.copies[0].address
            assert isinstance(answer, Resident)
            page = answer.extents[0][0] * address.page_bytes
            at = address.arena_base + page + min(answer.size_bytes, address.page_bytes) // 2
            memory.seek(at)
            byte = memory.read(1)
            memory.seek(at)
            memory.write(bytes([byte[0] ^ 0x10]))
            store._loop.run(store._client.release(promise))
