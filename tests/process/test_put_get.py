"""The whole stack on real parts: a node process, its Redis, Mooncake over loopback, and clients that come and go."""

from time import monotonic

import numpy as np
import pytest

from kvstore.client import KVStore
from kvstore.core import Key, Manifest, chunk_key
from tests.support import wait_until
from tests.support.node import running_node

pytestmark = pytest.mark.process

MANIFEST = Manifest(
    weights="w",
    model={},
    kv_dtype="float32",
    tile_format="t",
    chunk_tokens=256,
    unit_tokens=16,
    lanes=((4, 2, 32768),),
)
SIZE = MANIFEST.geometry.object_bytes(256)


def chain(length: int) -> list[Key]:
    keys: list[Key] = []
    for number in range(length):
        keys.append(chunk_key(keys[-1] if keys else Key(MANIFEST.namespace), [number]))
    return keys


def objects(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 256, SIZE, np.uint8) for _ in range(count)]


def put(node: str, keys: list[Key], arrays: list[np.ndarray]) -> None:
    """Stores a chain, as a client that is gone afterwards."""
    with KVStore(node) as store:
        namespace = store.open(MANIFEST)
        for depth, (key, array) in enumerate(zip(keys, arrays, strict=True)):
            parent = keys[depth - 1] if depth else None
            assert store.put(namespace, key, array, parent=parent, depth=depth)


def test_what_one_client_pushed_another_pulls_and_it_is_counted(tmp_path) -> None:
    keys, arrays = chain(3), objects(3)
    with running_node(tmp_path) as node:
        put(node.control, keys, arrays)
        with KVStore(node.control) as store:
            namespace = store.open(MANIFEST)
            found = store.get_many(namespace, [*keys, chunk_key(keys[-1], [99])])
            assert found[3] is None
            for got, expected in zip(found[:3], arrays, strict=True):
                assert got is not None
                assert np.array_equal(got, expected)
            wait_until(lambda: store.manifest(namespace) == MANIFEST, 10, "the manifest in the index")
        wait_until(lambda: node.stats()["pulled"]["objects"] == 3)
        stats = node.stats()
        assert stats["pushed"]["object_bytes"] == stats["pulled"]["object_bytes"] == 3 * SIZE
        assert stats["store"]["tiers"]["dram"]["objects"] == 3
        assert stats["store"]["leases"] == 0


def test_a_node_that_was_killed_and_started_again_has_nothing_and_takes_everything(tmp_path) -> None:
    keys, arrays = chain(2), objects(2)
    with running_node(tmp_path) as node:
        put(node.control, keys, arrays)
        node.kill()
        with running_node(tmp_path, control_listen=node.control) as again:
            assert again.stats()["identity"]["boot"] != ""
            assert again.told("mooncake") != node.told("mooncake")
            with KVStore(again.control) as store:
                assert store.get_many(store.open(MANIFEST), keys) == [None, None]
            put(again.control, keys, arrays)
            with KVStore(again.control) as store:
                found = store.get_many(store.open(MANIFEST), keys)
                assert all(
                    got is not None and np.array_equal(got, array)
                    for got, array in zip(found, arrays, strict=True)
                )


def test_a_node_that_stops_does_not_keep_a_reader_waiting(tmp_path) -> None:
    keys, arrays = chain(1), objects(1)
    with running_node(tmp_path) as node:
        put(node.control, keys, arrays)
        with KVStore(node.control) as store:
            namespace = store.open(MANIFEST)
            assert store.exists(namespace, keys[0])
            assert node.stop() == 0
            began_s = monotonic()
            assert store.get(namespace, keys[0]) is None
            assert monotonic() - began_s < 30
