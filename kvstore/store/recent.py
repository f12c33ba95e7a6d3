"""What was set last, and no more of it than there is room for."""

from collections import OrderedDict
from typing import Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """A dict of the entries set last, at most `entries_max`."""

    def __init__(self, entries_max: int) -> None:
        self._entries: OrderedDict[_K, _V] = OrderedDict()
        self._entries_max = entries_max

    def __contains__(self, key: _K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _K, default: _V) -> _V:
        """The value set last, if it is remembered."""
        return self._entries.get(key, default)

    def set(self, key: _K, value: _V) -> None:
        """Remembers an entry, and forgets the oldest if there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)

    def items(self) -> list[tuple[_K, _V]]:
        """All entries, those set last at the end."""
        return list(self._entries.items())

    def discard(self, key: _K) -> None:
        """Forgets an entry."""
        self._entries.pop(key, None)
