"""The negative control's hand: other KV under the right keys, with valid tables.

If decode's output did not change after this, nothing of it had come from the store.
"""

import contextlib

import numpy as np

from deploy.demo.engine import DemoFailed
from deploy.demo.node import Node
from kvstore.client import KVStore
from kvstore.core import Key, Namespace
from kvstore.node import MOONCAKE_NOISE, without_noise


def forge_all(node: Node) -> int:
    """Replaces every object that can be read by its values' negatives; how many there were.

    Raises:
        DemoFailed: an object could not be replaced.
    """
    objects = [view for view in node.objects() if view["tiers"].get("dram") == "ready"]
    with contextlib.ExitStack() as exits:
        with without_noise(MOONCAKE_NOISE):
            store = exits.enter_context(KVStore(node.control))
        for name in {view["namespace"] for view in objects}:
            namespace = Namespace(bytes.fromhex(name))
            manifest = store.manifest(namespace)
            if manifest is None:
                raise DemoFailed(f"the index does not know the manifest of namespace {name}", node.log_path)
            store.open(manifest)
            for view in objects:
                if view["namespace"] == name:
                    _forge(store, namespace, Key(bytes.fromhex(view["key"])), view["depth"], node)
    return len(objects)


def _forge(store: KVStore, namespace: Namespace, key: Key, depth: int, node: Node) -> None:
    data = store.get(namespace, key)
    if data is None:
        raise DemoFailed(f"object {key.hex()} cannot be read", node.log_path)
    store.drop(namespace, [key])
    if not store.put(namespace, key, -data.view(np.float32), depth=depth):
        raise DemoFailed(f"object {key.hex()} cannot be written again", node.log_path)
