"""The contract of eviction: state in, plan out.

Policies hold identities and sizes, never bytes, and know no clock and no I/O. Clauses every policy keeps
(tests/contracts/policy.py), checked against the plain twin:

* A chunk is never planned away while a child of it is held, unless the child goes in the same plan,
  before it.
* Only what `evictable` allows is planned; a plan is enough for the need, or says that it is not.
* Cold entries go first, unless they have been used by others.

What the caller owes: parents form no cycle, and an entry that `evictable` forbade is touched when it
becomes evictable (the end of a lease *is* a use). Until then a policy need not look at it again, so a plan
costs O(victims log n) however many entries are leased.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol


class Plan(NamedTuple):
    """What to give up, in order, and whether that is enough."""

    victims: tuple[Hashable, ...]
    enough: bool


class Policy(Protocol):
    """Chooses what to give up."""

    def insert(self, entry: Hashable, parent: Hashable, pages: int, *, cold: bool) -> None:
        """An entry became held. Its parent need not be held."""

    def touch(self, entry: Hashable, *, cold: bool | None = None) -> None:
        """An entry was used. `cold` marks or unmarks it."""

    def remove(self, entry: Hashable) -> None:
        """An entry is not held any more, for whatever reason."""

    def children(self, entry: Hashable) -> int:
        """How many held entries name this one, held or not, as their parent."""

    def plan(self, need_pages: int, evictable: Callable[[Hashable], bool]) -> Plan:
        """Entries whose pages add up to `need_pages`, least worth first. Changes nothing."""
