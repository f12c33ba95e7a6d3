"""Which goes first, in literals: the same for both policies."""

import pytest

from kvstore.policy import Lru, Plan, Policy, PrefixLru


@pytest.fixture(params=[Lru, PrefixLru])
def policy(request: pytest.FixtureRequest) -> Policy:
    made: Policy = request.param()
    return made


def anything(_: object) -> bool:
    return True


def hold(policy: Policy, chain: str, *, cold: bool = False) -> None:
    """Inserts a chain, one page each: its letters are its entries."""
    for parent, entry in zip("." + chain, chain, strict=False):
        policy.insert(entry, parent, 1, cold=cold)


def order(policy: Policy, need: int) -> str:
    return "".join(str(victim) for victim in policy.plan(need, anything).victims)


def test_the_least_recently_used_goes_first(policy: Policy) -> None:
    for entry in "abc":
        hold(policy, entry)
    policy.touch("a")
    assert order(policy, 3) == "bca"


def test_a_chain_goes_from_its_end(policy: Policy) -> None:
    hold(policy, "abcd")
    assert order(policy, 2) == "dc"


def test_a_parent_used_lately_outlives_its_children(policy: Policy) -> None:
    """The shared beginning of many prompts stays although its last child is the oldest of all."""
    hold(policy, "ab")
    hold(policy, "x")
    policy.touch("a")
    assert order(policy, 3) == "bxa"


def test_cold_goes_before_warm_however_recent(policy: Policy) -> None:
    hold(policy, "a")
    hold(policy, "z", cold=True)
    assert order(policy, 2) == "za"


def test_what_others_used_is_not_cold_any_more(policy: Policy) -> None:
    hold(policy, "z", cold=True)
    hold(policy, "a")
    policy.touch("z", cold=False)
    assert order(policy, 2) == "az"


def test_a_leased_child_keeps_its_parents(policy: Policy) -> None:
    hold(policy, "abc")
    hold(policy, "x")
    assert policy.plan(4, lambda entry: entry != "c") == Plan(("x",), enough=False)


def test_no_need_needs_nothing(policy: Policy) -> None:
    assert policy.plan(0, anything) == Plan((), enough=True)


def test_nothing_held_is_never_enough(policy: Policy) -> None:
    assert policy.plan(1, anything) == Plan((), enough=False)


def test_a_plan_asks_for_each_leased_leaf_once() -> None:
    """A tier full of old leases costs the first plan, not every plan: `evictable` is asked about them once."""
    policy = PrefixLru()
    for entry in range(1000):
        policy.insert(entry, -1, 1, cold=False)
    asked: list[object] = []

    def only_the_last(entry: object) -> bool:
        asked.append(entry)
        return entry == 999

    assert policy.plan(1, only_the_last) == Plan((999,), enough=True)
    assert len(asked) == 1000
    assert policy.plan(1, only_the_last) == Plan((999,), enough=True)
    assert len(asked) == 1001
    policy.touch(5)
    assert policy.plan(2, lambda entry: entry in {5, 999}).victims == (999, 5)


def test_stale_records_are_swept_out() -> None:
    """Cold tails that come and go under one hot parent leave records of it behind; they do not pile up."""
    policy = PrefixLru()
    policy.insert("old", ".", 1, cold=False)
    policy.insert("hot", ".", 1, cold=False)
    for tail in range(10_000):
        policy.touch("hot")
        policy.insert(tail, "hot", 1, cold=True)
        policy.remove(tail)
    assert len(policy._exposed) < 2_000
    assert policy.plan(2, anything) == Plan(("old", "hot"), enough=True)
