"""What is done to the objects of a running node: bits flipped in its memory, forgotten, brought from NVMe."""

from pathlib import Path

from kvstore.client import KVStore, Resident
from kvstore.core import Key, Manifest, Namespace, chunk_key
from tests.support import wait_until

OPENED_S = 30.0


def _manifest(store: KVStore, namespace: Namespace) -> Manifest:
    """As the index has it, once an engine has opened the namespace: a restarted node's own Redis is empty."""
    manifest = wait_until(lambda: store.manifest(namespace), OPENED_S, "the index to have the manifest")
    assert manifest is not None
    return manifest


def objects_by_kind(control: str, views: list[dict[str, object]]) -> dict[int, list[Key]]:
    """The keys of a node's objects (as /v1/objects shows them), by kind; of one namespace.

    What is the key of a piece of another is one; size and table may not tell.
    """
    [name] = {str(view["namespace"]) for view in views}
    with KVStore(control, transfer="shm") as store:
        manifest = _manifest(store, Namespace(bytes.fromhex(name)))
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
        store.open(_manifest(store, namespace))
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
        store.open(_manifest(store, namespace))
        store.drop(namespace, keys)


def promote(control: str, namespace: Namespace, keys: list[Key]) -> None:
    """Has the node bring these objects from NVMe into its memory."""
    with KVStore(control, transfer="shm") as store:
        store.open(_manifest(store, namespace))
        store._loop.run(store._client.prefetch(namespace, keys))
