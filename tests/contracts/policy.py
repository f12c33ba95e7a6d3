"""What every policy does (kvstore/policy/base.py): a Hypothesis machine over any policy, against the plain twin.

Invariants are checked on the plan itself, and the plan must be the twin's.

Mutants of PrefixLru that must fail here (each was tried):
* `insert` does not take the parent out of the queue -> a parent goes before its child;
* `remove` does not expose the parent -> a plan says "not enough" where there is enough;
* `touch` leaves a leaf where it is -> the order is not that of use;
* `_put_back` forgets what was taken off the heap -> the second plan finds less than the first;
* `_is_live` does not look at children -> a stale record plans a parent away;
* `insert` does not ask for children that were there before their parent -> the parent goes first;
* `cold` is forgotten by `touch` -> a warm entry goes first.
"""

from collections.abc import Callable
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvstore.policy import Lru, Plan, Policy

Name = int
ROOT: Name = -1
"""An entry that is never held, like a namespace digest."""

pages = st.sampled_from([1, 1, 1, 2, 3, 32])
colds = st.booleans()
picks = st.integers(0, 15)
"""Chooses one of what there is; counts from what was inserted last, so that chains grow."""


class PolicyMachine(RuleBasedStateMachine):
    """Entries are numbers; a parent has a smaller one, so there are no cycles."""

    policy: Policy

    @initialize()
    def start(self) -> None:
        self.twin = Lru()
        self.held: dict[Name, tuple[Name, int, bool]] = {}  # entry -> parent, pages, cold
        self.gone: list[Name] = []
        self.leased: set[Name] = set()
        self.next_name = 0

    @rule(pick=picks, pages=pages, cold=colds)
    def insert_child(self, pick: int, pages: int, cold: bool) -> None:
        """Under a parent that is held."""
        if self.held:
            self.hold(self.new_name(), self.pick(pick), pages, cold)

    @rule(pick=picks, pages=pages, cold=colds)
    def insert_orphan(self, pick: int, pages: int, cold: bool) -> None:
        """Under a parent that was held, or that never is."""
        parent = self.gone[-1 - pick % len(self.gone)] if self.gone and pick else ROOT
        self.hold(self.new_name(), parent, pages, cold)

    @rule(pick=picks, parent_pick=picks, pages=pages, cold=colds)
    def insert_again(self, pick: int, parent_pick: int, pages: int, cold: bool) -> None:
        """What was removed comes back; its children may be held still."""
        if self.gone:
            entry = self.gone.pop(-1 - pick % len(self.gone))
            older = [held for held in self.held if held < entry]
            self.hold(entry, older[-1 - parent_pick % len(older)] if older else ROOT, pages, cold)

    @rule(pick=picks, cold=st.one_of(st.none(), colds))
    def touch(self, pick: int, cold: bool | None) -> None:
        if self.held:
            entry = self.pick(pick)
            parent, pages, was_cold = self.held[entry]
            self.held[entry] = parent, pages, was_cold if cold is None else cold
            for policy in (self.policy, self.twin):
                policy.touch(entry, cold=cold)

    @rule(pick=picks)
    def remove(self, pick: int) -> None:
        if self.held:
            self.forget(self.pick(pick))

    @rule(pick=picks)
    def lease(self, pick: int) -> None:
        if self.held:
            self.leased.add(self.pick(pick))

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """What was forbidden is touched when that ends, as the contract asks."""
        if self.leased:
            entry = sorted(self.leased)[pick % len(self.leased)]
            self.leased.discard(entry)
            for policy in (self.policy, self.twin):
                policy.touch(entry)

    @rule(need=st.one_of(st.integers(0, 3), st.integers(0, 80)), carry_out=st.booleans())
    def plan(self, need: int, carry_out: bool) -> None:
        plan = self.planned(need)
        assert plan == self.planned(need), "a plan changes nothing"
        assert plan == self.twin.plan(need, self.may_go)
        if carry_out:
            for victim in plan.victims:
                self.forget(victim)

    @rule()
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

    @rule()
    def children_are_counted_whether_their_parent_is_held_or_not(self) -> None:
        parents = [parent for parent, *_ in self.held.values()]
        for entry in {*parents, *self.held, -1}:
            assert self.policy.children(entry) == parents.count(entry)

    def planned(self, need: int) -> Plan:
        """A plan of the policy, after its clauses were checked."""
        plan = self.policy.plan(need, self.may_go)
        left = dict(self.held)
        gone = 0
        for index, victim in enumerate(plan.victims):
            assert isinstance(victim, Name)
            assert gone < need, "nothing is planned beyond the need"
            assert victim not in self.leased, "what may not go is planned"
            parents = {parent for parent, *_ in left.values()}
            assert victim not in parents, "a parent goes before its child"
            colder = [e for e in left if left[e][2] and e not in self.leased and e not in parents]
            assert left[victim][2] or not colder, f"victim {index} is warm while a cold one could go"
            gone += left.pop(victim)[1]
        assert plan.enough == (gone >= need), "a plan is enough, or says that it is not"
        return plan

    def new_name(self) -> Name:
        self.next_name += 1
        return self.next_name

    def pick(self, pick: int) -> Name:
        return list(self.held)[-1 - pick % len(self.held)]

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
        self.gone.append(entry)
        for policy in (self.policy, self.twin):
            policy.remove(entry)


def machine_of(make: Callable[[], Policy]) -> type[PolicyMachine]:
    """The machine of a policy; its `TestCase` is a test."""

    class Machine(PolicyMachine):
        def __init__(self) -> None:
            super().__init__()
            self.policy = make()

    return Machine


def walk(machine_type: type[PolicyMachine], seed: int, steps: int = 200) -> None:
    """A long walk with every rule switched on: reaches states that short examples do not."""
    random = Random(seed)
    machine = machine_type()
    machine.start()
    for _ in range(steps):
        pick, other, size, cold = (
            random.randrange(16),
            random.randrange(16),
            random.choice([1, 1, 2, 32]),
            random.random() < 0.4,
        )
        match random.randrange(12):
            case 0 | 1 | 2:
                machine.insert_child(pick, size, cold)
            case 3:
                machine.insert_orphan(pick, size, cold)
            case 4:
                machine.insert_again(pick, other, size, cold)
            case 5 | 6:
                machine.touch(pick, random.choice([None, True, False]))
            case 7:
                machine.remove(pick)
            case 8:
                machine.lease(pick)
            case 9:
                machine.release(pick)
            case _:
                machine.plan(random.choice([0, 1, 2, 5, 40]), random.random() < 0.5)
