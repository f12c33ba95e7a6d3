"""What this engine believes to be stored: saves that need not be offered again.

Soft state: wrong entries cost a save (or a superfluous offer, which the node answers with "exists"). An
entry goes when a lookup or an acquire misses the key, so that what the store has lost is pushed again.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.core import Key

KEYS_MAX = 131_072


class Known:
    """A bounded LRU of keys, with the id of a node that holds each (empty where that is not known)."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._nodes: OrderedDict[Key, str] = OrderedDict()
        self._keys_max = keys_max

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def node_of(self, key: Key) -> str | None:
        """The id of a node that holds the key; None when the key is not known to be stored."""
        node = self._nodes.get(key)
        if node is not None:
            self._nodes.move_to_end(key)
        return node

    def add(self, key: Key, node: str = "") -> None:
        """The key is stored."""
        self._nodes[key] = node or self._nodes.get(key, "")
        self._nodes.move_to_end(key)
        if len(self._nodes) > self._keys_max:
            self._nodes.popitem(last=False)

    def forget(self, keys: Iterable[Key]) -> None:
        """These keys are not stored any more."""
        for key in keys:
            self._nodes.pop(key, None)

    def clear(self) -> None:
        """Everything may be gone."""
        self._nodes.clear()
