"""What every policy does (kvstore/policy/base.py): a Hypothesis machine over any policy, against the plain twin.

Use: `TestX = policy_machine(X)`. Invariants are checked on the plan itself, and the plan must be the twin's.

Mutants of PrefixLru that must fail here (each was tried):
* `insert` does not take the parent out of the queue -> a parent goes before its child;
* `remove` does not expose the parent -> a plan says "not enough" where there is enough;
* `touch` leaves a leaf where it is -> the order is not that of use;
* `_put_back` forgets what was taken off the heap -> the second plan finds less than the first;
* `_is_live` does not look at children -> a stale record plans a parent away;
* `cold` is forgotten by `touch` -> a warm entry goes first.
"""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvstore.policy import Lru, Plan, Policy

Name = int
ROOT: Name = -1
"""An entry that is never held, like a namespace digest."""

pages = st.sampled_from([1, 1, 1, 2, 3, 32])
colds = st.booleans()


class PolicyMachine(RuleBasedStateMachine):
    """Entries are numbers; a parent has a smaller one, so there are no cycles."""

    policy: Policy
    entries = Bundle("entries")

    @initialize()
    def start(self) -> None:
        self.twin = Lru()
        self.held: dict[Name, tuple[Name, int, bool]] = {}  # entry -> parent, pages, cold
        self.leased: set[Name] = set()
        self.next_name = 0

    @rule(target=entries, parent=st.one_of(st.just(ROOT), entries), pages=pages, cold=colds)
    def insert(self, parent: Name, pages: int, cold: bool) -> Name:
        """Under a parent that is held, or was, or never is."""
        name = self.next_name
        self.next_name += 1
        self.hold(name, parent, pages, cold)
        return name

    @rule(entry=entries, parent=st.one_of(st.just(ROOT), entries), pages=pages, cold=colds)
    def insert_again(self, entry: Name, parent: Name, pages: int, cold: bool) -> None:
        """What was evicted comes back; its children may be held still."""
        if entry not in self.held and parent < entry:
            self.hold(entry, parent, pages, cold)

    @rule(entry=entries, cold=st.one_of(st.none(), colds))
    def touch(self, entry: Name, cold: bool | None) -> None:
        if entry in self.held:
            parent, pages, was_cold = self.held[entry]
            self.held[entry] = parent, pages, was_cold if cold is None else cold
            for policy in (self.policy, self.twin):
                policy.touch(entry, cold=cold)

    @rule(entry=consumes(entries))
    def remove(self, entry: Name) -> None:
        if entry in self.held:
            self.forget(entry)

    @rule(entry=entries)
    def lease(self, entry: Name) -> None:
        if entry in self.held:
            self.leased.add(entry)

    @rule(entry=entries)
    def release(self, entry: Name) -> None:
        """What was forbidden is touched when that ends, as the contract asks."""
        if entry in self.leased:
            self.leased.discard(entry)
            for policy in (self.policy, self.twin):
                policy.touch(entry)

    @rule(need=st.integers(0, 40), carry_out=st.booleans())
    def plan(self, need: int, carry_out: bool) -> None:
        plan = self.planned(need)
        assert plan == self.planned(need), "a plan changes nothing"
        assert plan == self.twin.plan(need, self.may_go)
        if carry_out:
            for victim in plan.victims:
                self.forget(victim)

    @invariant()
    def everything_that_may_go_can_be_planned(self) -> None:
        """Never less than there is: a leaf, then what it bares, down to what is leased."""
        goes: set[Name] = set()
        for entry in sorted(self.held, reverse=True):  # children before parents
            children = {child for child, (parent, *_) in self.held.items() if parent == entry}
            if entry not in self.leased and children <= goes:
                goes.add(entry)
        total = sum(self.held[entry][1] for entry in goes)
        assert self.planned(total).enough
        assert not self.planned(total + 1).enough

    def planned(self, need: int) -> Plan:
        """A plan of the policy, after its clauses were checked."""
        plan = self.policy.plan(need, self.may_go)
        left = dict(self.held)
        gone = 0
        for index, victim in enumerate(plan.victims):
            assert isinstance(victim, Name)
            assert gone < need, "nothing is planned beyond the need"
            assert victim not in self.leased, "what may not go is planned"
            assert victim not in {parent for parent, *_ in left.values()}, "a parent goes before its child"
            parents = {parent for parent, *_ in left.values()}
            colder = [e for e in left if left[e][2] and e not in self.leased and e not in parents]
            assert left[victim][2] or not colder, f"victim {index} is warm while a cold one could go"
            gone += left.pop(victim)[1]
        assert plan.enough == (gone >= need), "a plan is enough, or says that it is not"
        return plan

    def may_go(self, entry: object) -> bool:
        return entry not in self.leased

    def hold(self, entry: Name, parent: Name, pages: int, cold: bool) -> None:
        self.held[entry] = parent, pages, cold
        for policy in (self.policy, self.twin):
            policy.insert(entry, parent, pages, cold=cold)

    def forget(self, entry: object) -> None:
        assert isinstance(entry, Name)
        del self.held[entry]
        self.leased.discard(entry)
        for policy in (self.policy, self.twin):
            policy.remove(entry)


def policy_machine(make: Callable[[], Policy]) -> type:
    """The test case of a policy."""

    class Machine(PolicyMachine):
        def __init__(self) -> None:
            super().__init__()
            self.policy = make()

    Machine.TestCase.settings = settings(stateful_step_count=60)
    return Machine.TestCase
