"""The listed objects, and what is told when a key's state changes.

A key gets here by a reservation and leaves by being evicted, given up, dropped, or found bad. Whoever
changes that calls this: it keeps the map, remembers why a key is gone, marks keys dirty for the index and
tells those who watch. Calls that tell are the last thing of a change, so callbacks may look at the store.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable
from typing import Generic, TypeVar

from kvstore.core import Event, Key, MissReason, Namespace, State, Tier, limits
from kvstore.policy import Policy
from kvstore.store.clients import Client
from kvstore.store.dram import Dram
from kvstore.store.objects import Object
from kvstore.store.snapshot import Totals
from kvstore.store.watches import Watches
from kvstore.wire import Resident

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


def _ignore(_: Key) -> None:
    pass


class Listing:
    """Objects by key."""

    def __init__(self, page_count: int, policy: Policy) -> None:
        self.objects: dict[Key, Object] = {}
        self.lost: Recent[Key, MissReason] = Recent(limits.LOST_KEYS_MAX)
        self.dram = Dram(page_count, policy, self._evicted)
        self.watches = Watches()
        self.totals = Totals()
        self.on_dirty: Callable[[Key], None] = _ignore

    def find(self, namespace: Namespace, key: Key) -> Object | None:
        """The listed object of a key, filling or ready."""
        listed = self.objects.get(key)
        return listed if listed is not None and listed.namespace.id == namespace else None

    def add(self, filling: Object, pages: int, spared: Container[Hashable], young_s: float) -> bool:
        """Lists an object that is to be filled; False when there is no room for it. See `Dram.fill`."""
        assert filling.key not in self.objects, "a key has one listed object"
        if not self.dram.fill(filling, pages, spared, young_s):
            return False
        self.objects[filling.key] = filling
        filling.namespace.num_objects += 1
        return True

    def publish(self, filled: Object, table: bytes) -> None:
        """The object may be read from now on."""
        filled.table = table
        self.dram.commit(filled)
        extents = filled.copies[Tier.DRAM].extents
        filled.resident = Resident(filled.generation, extents, filled.size_bytes, table)
        self.lost.discard(filled.key)
        self.on_dirty(filled.key)
        self.watches.fire(filled.key)

    def give_up(self, filling: Object, event: Event) -> None:
        """The object will not be filled; nothing can land in its pages any more."""
        self._unlist(filling)
        self.dram.abandon(filling, event)
        self.watches.fire(filling.key)

    def give_up_held(self, filling: Object, event: Event, client: Client, until_s: float) -> None:
        """The object will not be filled; something may land in its pages until `until_s`."""
        self._unlist(filling)
        self.dram.hold(filling, event, client, until_s)
        self.watches.fire(filling.key)

    def retire(self, ready: Object, reason: MissReason) -> None:
        """Nobody gets the object any more; those who have it keep it."""
        self._unlist(ready)
        self.dram.retire(ready)
        self._gone(ready.key, reason)

    def state_of(self, key: Key) -> State | None:
        """The state of a key's listed copy."""
        listed = self.objects.get(key)
        return None if listed is None else listed.copies[Tier.DRAM].state

    def audit(self) -> None:
        """Asserts that what is listed here is what has pages there, and the books of both."""
        self.dram.audit()
        self.watches.audit()
        for key, listed in self.objects.items():
            assert listed.key == key, "an object is listed under another key"
            assert listed.listed, "an object does not know that it is listed"
            filling = listed.copies[Tier.DRAM].state is State.FILLING
            assert filling == (listed.reservation is not None), "an object is filling without a reservation"
        per_namespace = Counter(listed.namespace for listed in self.objects.values())
        assert all(opened.num_objects == count for opened, count in per_namespace.items()), (
            "the objects of a namespace are miscounted"
        )

    def _unlist(self, listed: Object) -> None:
        del self.objects[listed.key]
        listed.listed = False
        listed.namespace.num_objects -= 1

    def _evicted(self, victim: Object) -> None:
        self._unlist(victim)
        self.totals.evicted += 1
        self.totals.evicted_bytes += victim.size_bytes
        self._gone(victim.key, MissReason.EVICTED)

    def _gone(self, key: Key, reason: MissReason) -> None:
        self.lost.set(key, reason)
        self.on_dirty(key)
