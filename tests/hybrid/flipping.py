"""What is done to the objects of a running node: bits flipped in its memory, forgotten, brought from NVMe."""

from pathlib import Path

from kvstore.client import KVStore, Resident
from kvstore.core import Key, Namespace, chunk_key


def objects_by_kind(control: str, views: list[dict[str, object]]) -> dict[int, list[Key]]:
    """The keys of a node's objects (as /v1/objects shows them), by kind; of one namespace.

    What is the key of a piece of another is one; size and table may not tell.
    """
    [name] = {str(view["namespace"]) for view in views}
    with KVStore(control, transfer="shm") as store:
        manifest = store.manifest(Namespace(bytes.fromhex(name)))
    assert manifest is not None, "the index has lost the namespace"
    keys = [Key(bytes.fromhex(str(view["key"]))) for view in views]
    pieces = {
        chunk_key(parent, (), [("kind", kind.name, number)]): number
        for parent in keys
        for number, kind in enumerate(manifest.kinds, 1)
    }
    found: dict[int, list[Key]] = {}
    for key in keys:
        found.setdefault(pieces.get(key, 0), []).append(key)
    return found


def flip(control: str, pid: int, namespace: Namespace, keys: list[Key]) -> None:
    """A bit in the middle of the first page of each of these objects."""
    with (
        KVStore(control, transfer="shm") as store,
        Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory,
    ):
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


def drop(control: str, namespace: Namespace, keys: list[Key]) -> None:
    """Has the node forget these objects."""
    with KVStore(control, transfer="shm") as store:
        manifest = store.manifest(namespace)
        assert manifest is not None, "the index has lost the namespace"
        store.open(manifest)
        store.drop(namespace, keys)


def promote(control: str, namespace: Namespace, keys: list[Key]) -> None:
    """Has the node bring these objects from NVMe into its memory."""
    with KVStore(control, transfer="shm") as store:
        manifest = store.manifest(namespace)
        assert manifest is not None, "the index has lost the namespace"
        store.open(manifest)
        store._loop.run(store._client.prefetch(namespace, keys))
