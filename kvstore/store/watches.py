"""Who wants to know when a key's fate is decided."""

from collections.abc import Callable, Iterable

from kvstore.core import Key, limits


class Watch:
    """One party's interest in some keys; over after the first of them."""

    __slots__ = ("callback", "keys")

    def __init__(self, callback: Callable[[], None], keys: tuple[Key, ...]) -> None:
        self.callback = callback
        self.keys = keys


class Watches:
    """At most `WATCHED_KEYS_MAX` keys are watched at once, those of several parties counted severally."""

    def __init__(self) -> None:
        self._watches: dict[Key, dict[Watch, None]] = {}
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def add(self, keys: Iterable[Key], callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back once, when `fire` is called for one of the keys. Returns what cancels that.

        Over the bound nothing is watched: the party waits until its own deadline, and asks again.
        """
        watch = Watch(callback, tuple(dict.fromkeys(keys)))
        if self._num_keys + len(watch.keys) > limits.WATCHED_KEYS_MAX:
            return lambda: None
        for key in watch.keys:
            self._watches.setdefault(key, {})[watch] = None
        self._num_keys += len(watch.keys)
        return lambda: self._cancel(watch)

    def fire(self, key: Key) -> None:
        """Something happened to `key`: calls everybody who watches it."""
        for watch in list(self._watches.get(key, ())):
            if watch in self._watches.get(key, ()):  # no callback before this one has cancelled it
                self._cancel(watch)
                watch.callback()

    def audit(self) -> None:
        """Asserts that the bound counts what is there."""
        assert self._num_keys == sum(map(len, self._watches.values())), "watched keys are miscounted"

    def _cancel(self, watch: Watch) -> None:
        for key in watch.keys:
            watching = self._watches.get(key, {})
            if watch in watching:
                del watching[watch]
                self._num_keys -= 1
                if not watching:
                    del self._watches[key]
