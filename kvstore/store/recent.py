"""What was set last, and no more of it than there is room for."""

from typing import Generic, TypeVar

from kvstore.core import Link, Queue, unlink

_K = TypeVar("_K")
_V = TypeVar("_V")


class _Entry(Link, Generic[_K, _V], eq=False, gc=False):
    key: _K
    value: _V


class Recent(Generic[_K, _V]):
    """A dict of the entries set last, at most `entries_max`."""

    def __init__(self, entries_max: int) -> None:
        self._entries: dict[_K, _Entry[_K, _V]] = {}
        self._queue: Queue[_Entry[_K, _V]] = Queue()
        self._entries_max = entries_max

    def __contains__(self, key: _K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _K, default: _V) -> _V:
        """The value set last, if it is remembered."""
        entry = self._entries.get(key)
        return default if entry is None else entry.value

    def set(self, key: _K, value: _V) -> None:
        """Remembers an entry, and forgets the oldest if there are too many."""
        self.discard(key)
        entry = self._entries[key] = _Entry(key, value)
        self._queue.append(entry)
        if len(self._entries) > self._entries_max:
            self.discard(next(iter(self._queue)).key)

    def items(self) -> list[tuple[_K, _V]]:
        """All entries, those set last at the end."""
        return [(entry.key, entry.value) for entry in self._queue]

    def discard(self, key: _K) -> None:
        """Forgets an entry."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            unlink(entry)
