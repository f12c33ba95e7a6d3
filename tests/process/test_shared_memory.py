"""A client on the node's host: by the arena's own memory, by Mooncake, and by itself whichever is right.

Mutants that must fail here: an `auto` that always takes Mooncake; a node that hands out memory although told not to;
a mapping that outlives its boot.
"""

from pathlib import Path

import numpy as np
import pytest

from kvstore.client import KVStore
from kvstore.transfer import AutoTransfer, SharedMemoryTransfer
from tests.process.test_put_get import MANIFEST, SIZE, chain, objects
from tests.support import wait_until
from tests.support.node import running_node

pytestmark = pytest.mark.process


def near_bytes(store: KVStore) -> int:
    """Bytes that a client has copied by itself."""
    transfer = store._transfer
    near = transfer._near if isinstance(transfer, AutoTransfer) else transfer
    return near.copied_bytes if isinstance(near, SharedMemoryTransfer) else 0


def put_one(store: KVStore) -> None:
    assert store.put(store.open(MANIFEST), chain(1)[0], objects(1)[0])


def is_there(store: KVStore) -> bool:
    found = store.get(store.open(MANIFEST), chain(1)[0])
    return found is not None and np.array_equal(found, objects(1)[0])


@pytest.mark.parametrize(("writer", "reader"), [("auto", "mooncake"), ("mooncake", "shm"), ("shm", "auto")])
def test_the_same_object_whichever_way_it_came_and_goes(tmp_path: Path, writer: str, reader: str) -> None:
    with running_node(tmp_path, transfer_shm_dir=str(tmp_path / "run")) as node:
        with KVStore(node.control, transfer=writer) as store:
            put_one(store)
            assert near_bytes(store) == (0 if writer == "mooncake" else SIZE + 1)  # and what `meet` read
        with KVStore(node.control, transfer=reader) as store:
            assert is_there(store)
            assert near_bytes(store) == (0 if reader == "mooncake" else SIZE + 1)
        assert node.stop() == 0
    assert not list((tmp_path / "run").iterdir()), "the socket is still there"


def test_a_node_that_does_not_share_is_reached_by_mooncake_or_not_at_all(tmp_path: Path) -> None:
    with running_node(tmp_path, no_transfer_shm=True) as node:
        assert "not shared with clients on this host" in node.banner
        with KVStore(node.control) as store:
            put_one(store)
            assert is_there(store)
            assert near_bytes(store) == 0
        with KVStore(node.control, transfer="shm") as store:
            assert store.get(store.open(MANIFEST), chain(1)[0]) is None


def test_a_client_outlives_its_node_and_takes_the_memory_of_the_next(tmp_path: Path) -> None:
    """And a killed node leaves a socket that the next one removes."""
    run = tmp_path / "run"
    with running_node(tmp_path, transfer_shm_dir=str(run)) as node, KVStore(node.control) as store:
        put_one(store)
        assert is_there(store)
        node.kill()
        wait_until(lambda: "kvstore-arena" not in Path("/proc/self/maps").read_text(), 5, "it is unmapped")
        (left,) = run.iterdir()
        with running_node(tmp_path, transfer_shm_dir=str(run), control_listen=node.control):
            (now,) = run.iterdir()
            assert now != left
            before = near_bytes(store)
            wait_until(lambda: store.get(store.open(MANIFEST), chain(1)[0]) is None, 10)
            put_one(store)
            assert is_there(store)
            assert near_bytes(store) == before + 2 * SIZE
