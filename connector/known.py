"""What this engine believes to be stored: saves that need not be offered again.

Soft state, and only for a while: nodes evict and restart without telling. Wrong entries cost a save, missing
ones a superfluous offer, which the node answers with "exists". An entry also goes when a lookup or an acquire
misses the key, so that what the store has lost is pushed again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvstore.core import Key

KEYS_MAX = 131_072
BELIEVED_S = 60.0


class _Entry(NamedTuple):
    node: str
    until_s: float


class Known:
    """A bounded LRU of keys, with the id of a node that holds each (empty where that is not known)."""

    def __init__(self, clock: Callable[[], float], keys_max: int = KEYS_MAX) -> None:
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._clock = clock
        self._keys_max = keys_max

    def __len__(self) -> int:
        return len(self._entries)

    def node_of(self, key: Key) -> str | None:
        """The id of a node that holds the key; None when the key is not known to be stored."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.until_s <= self._clock():
            del self._entries[key]
            return None
        return entry.node

    def add(self, key: Key, node: str = "") -> None:
        """The key is stored, as the store has just said."""
        self._entries[key] = _Entry(node, self._clock() + BELIEVED_S)
        self._entries.move_to_end(key)
        if len(self._entries) > self._keys_max:
            self._entries.popitem(last=False)

    def forget(self, keys: Iterable[Key]) -> None:
        """These keys are not stored any more."""
        for key in keys:
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Everything may be gone."""
        self._entries.clear()
