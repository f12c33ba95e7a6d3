"""A Reserve in slices: the same answers as in one go, and others may do anything in between."""

from collections.abc import Iterable, Sequence
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import BadRequest, limits
from kvstore.store import Steps, in_one_go
from kvstore.wire import Busy, Granted, ReserveAnswer, ReserveItem
from tests.store.world import ANN, BOB, CAT, MANIFEST, NAMESPACE, TOKEN_BYTES, World, items

OTHER = msgspec.structs.replace(MANIFEST, weights="others")
FULL = "abcdefghijklmnopqrst"  # twenty objects of three pages


def begin(world: World, batch: Sequence[ReserveItem]) -> Steps[tuple[ReserveAnswer, ...]]:
    """A Reserve whose first slice is done."""
    steps = world.store.reserving(ANN, NAMESPACE, batch, 30.0)
    next(steps)
    return steps


def roots(names: str) -> list[ReserveItem]:
    """A batch of chains of one chunk."""
    return [item for name in names for item in items(name)]


def full_world(names: Iterable[str]) -> World:
    """All pages are taken, by chains of one chunk."""
    world = World()
    for name in names:
        world.put(CAT, name)
        world.now_s += limits.YOUNG_S
    return world


@given(st.lists(st.sampled_from(FULL), max_size=9), st.integers(1, 4), st.sets(st.sampled_from(FULL)))
def test_the_answers_are_those_of_one_go(names: list[str], per_slice: int, stored: set[str]) -> None:
    """Mutants: a slice begins one too late; the last slice is left out; the share is that of the first slice."""
    one, other = World(), World()
    for world in (one, other):
        for name in sorted(stored):
            world.put(BOB, name)
    with patch.object(limits, "RESERVED_PER_SLICE", len(names) + 1):
        whole = one.reserve(ANN, names)
    with patch.object(limits, "RESERVED_PER_SLICE", per_slice):
        sliced = other.reserve(ANN, names)
    assert list(map(type, sliced)) == list(map(type, whole))
    assert other.look(FULL) == one.look(FULL)
    assert other.free_pages == one.free_pages


@patch.object(limits, "RESERVED_PER_SLICE", 1)
def test_what_another_client_reserves_in_between_is_busy() -> None:
    """Mutant: all keys are looked up in the first slice."""
    world = World()
    steps = begin(world, items("ab"))
    world.reserve(BOB, "b")
    assert [type(answer) for answer in in_one_go(steps)] == [Granted, Busy]


@patch.object(limits, "RESERVED_PER_SLICE", 1)
def test_a_bad_item_of_the_last_slice_is_refused_before_anything_is_reserved() -> None:
    """Mutant: each slice checks its own."""
    world = World()
    with pytest.raises(BadRequest):
        begin(world, [*items("a"), *items("b", TOKEN_BYTES + 1)])
    assert world.look("ab") == "--"


@patch.object(limits, "RESERVED_PER_SLICE", 1)
def test_a_key_that_came_to_another_namespace_in_between_is_refused_and_stays_there() -> None:
    """Mutant: items are checked before the first slice alone; the key's object is then granted a second time."""
    world = World()
    world.store.open_namespace(OTHER.namespace, OTHER.encode())
    steps = begin(world, items("ab"))
    (theirs,) = world.store.reserve(BOB, OTHER.namespace, items("b"), 30.0)
    assert isinstance(theirs, Granted)
    with pytest.raises(BadRequest, match="belongs to another namespace"):
        in_one_go(steps)
    assert world.look("ab") == "~~"
    world.store.audit()


@patch.object(limits, "RESERVED_PER_SLICE", 1)
def test_nothing_of_the_batch_is_given_up_for_its_later_slices() -> None:
    """Mutant: a slice spares its own items only."""
    world = full_world(FULL)
    answers = in_one_go(begin(world, roots("xyab")))
    assert [type(answer) for answer in answers[:2]] == [Granted, Granted]
    assert world.look("ab") == "ab"
    assert world.look("cd") == "--"


@patch.object(limits, "RESERVED_PER_SLICE", 1)
def test_after_a_batch_that_was_given_up_half_way_its_items_can_be_evicted_again() -> None:
    """Mutant: `unspare` only at the end of a batch: what a plan passed over stays for ever."""
    world = full_world(FULL)
    steps = begin(world, roots("xab"))  # "a" and "b" are the oldest: the plan for "x" passes over them
    steps.close()
    for name in "123456":
        world.put(BOB, name)
        world.now_s += limits.YOUNG_S
    for name in FULL[3:]:
        world.put(CAT, name)
        world.now_s += limits.YOUNG_S
    assert world.look("ab") == "--"
    world.store.audit()
