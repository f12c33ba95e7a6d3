"""A chain of four times a node's memory, by the blocking facade in one call: real node, real file, real Mooncake."""

import numpy as np
import pytest

from kvstore.client import KVStore, Put
from kvstore.core import Key
from tests.faults.support import chain, shape
from tests.support import wait_until
from tests.support.node import running_node

pytestmark = pytest.mark.process

OBJECT_BYTES = 256 << 10
MODEL = shape(OBJECT_BYTES)
KEYS = chain(MODEL.namespace, 256, 1)  # 64 MiB


def content(depth: int) -> np.ndarray:
    return np.random.default_rng(depth).integers(0, 256, OBJECT_BYTES, np.uint8)


def test_a_chain_larger_than_memory_is_got_in_one_call(tmp_path) -> None:
    """Mutants: nothing is released before all has come; what may be leased at a time is all there is."""
    settings = {"nvme_path": tmp_path / "device", "nvme_size_bytes": "256MiB", "node_id": "n1"}
    arena = {"dram_size_bytes": "16MiB", "dram_page_bytes": "64KiB"}
    with running_node(tmp_path, **settings, **arena) as node, KVStore(node.control, timeout_s=60.0) as store:
        namespace = store.open(MODEL)
        parents: list[Key | None] = [None, *KEYS]
        done: set[int] = set()

        def pushed() -> bool:
            some = [n for n in range(len(KEYS)) if n not in done][:16]
            puts = [Put(KEYS[n], content(n), parents[n], n) for n in some]
            done.update(n for n, there in zip(some, store.put_many(namespace, puts), strict=True) if there)
            return len(done) == len(KEYS)

        wait_until(pushed, 60.0, "everything is stored, as room comes")
        got = store.get_many(namespace, KEYS)
        assert [n for n, one in enumerate(got) if one is None] == []
        assert all(np.array_equal(one, content(n)) for n, one in enumerate(got) if one is not None)
        wait_until(lambda: node.stats()["store"]["leases"] == 0)
        assert node.stats()["store"]["totals"]["promoted"] > 150, "most of it had left memory"
