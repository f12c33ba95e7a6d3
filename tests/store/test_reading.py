"""Readers: a hit is a promise until its lease ends, and a miss says why."""

from collections.abc import Sequence

import pytest

from kvstore.core import BadRequest, MissReason, Namespace, NamespaceUnknown, limits
from kvstore.wire import Acquire, Filling, Miss, Pages, Prefetch, Refused, Renew, Resident
from tests.store.world import (
    ANN,
    BOB,
    CAT,
    CHUNK_PAGES,
    NAMESPACE,
    World,
    generation_of,
    key_of,
    lease_of,
    reason_of,
)


def promised(answers: Sequence[object]) -> list[bool]:
    return [isinstance(answer, Resident) for answer in answers]


def fill(world: World) -> None:
    """Writes chains of one chunk until nothing more is let in: everything that may be evicted is gone."""
    for number in range(40):
        grants = world.reserve(ANN, [f"filler{number}"])
        if isinstance(grants[0], Refused):
            return
        world.commit(ANN, {f"filler{number}": grants[0]})


# --- promises -------------------------------------------------------------------------------------------


def test_a_leased_copy_is_neither_evicted_nor_reused() -> None:
    world = World(pages=12)
    world.put(ANN, "a")
    before = world.acquire(BOB, "a")
    fill(world)
    assert world.acquire(BOB, "a") == before


def test_after_its_release_it_is_evicted_like_others() -> None:
    world = World(pages=12)
    world.put(ANN, "a")
    world.acquire(BOB, "a")
    world.release(BOB)
    fill(world)
    assert world.acquire(BOB, "a") == [Miss(MissReason.EVICTED)]


def test_a_lease_ends_by_itself() -> None:
    """kill -9 of the reader leaks nothing."""
    world = World(pages=12)
    world.put(ANN, "a")
    world.acquire(BOB, "a", duration_s=10)
    world.after(10)
    assert world.store.snapshot().leases == 0
    fill(world)
    assert world.look("a") == "-"


def test_using_makes_recent() -> None:
    world = World(pages=12)
    for name in "abcd":
        world.put(ANN, name)
    world.acquire(BOB, "a")
    world.release(BOB)
    world.put(ANN, "e")
    assert world.look("abcde") == "a-cde"


def test_a_hint_makes_recent_without_a_lease() -> None:
    world = World(pages=12)
    for name in "abcd":
        world.put(ANN, name)
    world.store.prefetch(BOB, Prefetch(NAMESPACE, (key_of("a"), key_of("z"))))
    world.put(ANN, "e")
    assert world.look("abcde") == "a-cde"
    assert world.store.snapshot().leases == 0


def test_release_of_some_keys_keeps_the_others() -> None:
    world = World(pages=12)
    world.put(ANN, "a")
    world.put(ANN, "b")
    world.acquire(BOB, "ab")
    world.release(BOB, names="bx")
    fill(world)
    assert world.look("ab") == "a-"
    world.release(BOB, names="a")
    assert world.store.snapshot().leases == 0


def test_a_lease_belongs_to_its_client() -> None:
    """Two clients may choose the same name."""
    world = World(pages=12)
    world.put(ANN, "a")
    world.acquire(BOB, "a")
    world.acquire(CAT, "a")
    world.release(CAT)
    assert world.store.snapshot().leases == 1
    fill(world)
    assert world.look("a") == "a"


def test_two_leases_of_one_client_are_two() -> None:
    world = World(pages=12)
    world.put(ANN, "a")
    world.acquire(BOB, "a", "one")
    world.acquire(BOB, "a", "two")
    world.release(BOB, "one")
    fill(world)
    assert world.look("a") == "a"


# --- how long -------------------------------------------------------------------------------------------


def renew(world: World, duration_s: float) -> float:
    left_s = world.store.renew(BOB, Renew(lease_of("lease"), duration_s))
    world.store.audit()
    return left_s


def test_renewing_prolongs_from_now_on() -> None:
    world = World()
    world.put(ANN, "a")
    world.acquire(BOB, "a", duration_s=10)
    world.after(9)
    assert renew(world, 10) == 10
    world.after(9)
    assert renew(world, 2) == 2
    assert renew(world, 1) == 2, "a lease is never shortened"
    world.after(2)
    assert renew(world, 10) == 0


def test_a_lease_lives_for_a_bounded_time_in_total() -> None:
    world = World()
    world.put(ANN, "a")
    world.acquire(BOB, "a", duration_s=1e9)
    world.after(limits.LEASE_S_MAX - 1)
    assert renew(world, 60) == 1
    world.acquire(BOB, "a", duration_s=60)
    assert renew(world, 60) == 1
    world.after(1)
    assert world.store.snapshot().leases == 0


def test_a_lease_is_over_at_its_deadline_even_before_a_tick() -> None:
    world = World()
    world.put(ANN, "a")
    world.acquire(BOB, "a", duration_s=10)
    world.now_s += 10
    assert renew(world, 10) == 0
    assert world.store.pages(BOB, Pages(lease_of("lease"), (key_of("a"),))) == (Miss(MissReason.EXPIRED),)
    assert promised(world.acquire(BOB, "a", duration_s=10)) == [True], "its name may be used again"
    world.after(9)
    assert renew(world, 1) == 1


def test_asking_again_prolongs_and_adds() -> None:
    world = World()
    world.put(ANN, "ab")
    first = world.acquire(BOB, "a", duration_s=10)
    world.after(9)
    assert world.acquire(BOB, "ab", duration_s=10)[0] == first[0]
    world.after(9)
    snapshot = world.store.snapshot()
    assert (snapshot.leases, snapshot.totals.acquired_keys) == (1, 2)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan")])
def test_a_duration_is_positive(duration_s: float) -> None:
    world = World()
    world.put(ANN, "a")
    with pytest.raises(BadRequest, match="positive number of seconds"):
        world.acquire(BOB, "a", duration_s=duration_s)
    world.acquire(BOB, "a")
    with pytest.raises(BadRequest, match="positive number of seconds"):
        renew(world, duration_s)


def test_a_namespace_must_be_opened_in_this_boot() -> None:
    with pytest.raises(NamespaceUnknown):
        World().store.acquire(BOB, Acquire(Namespace(bytes(32)), (key_of("a"),), lease_of("lease"), 30))


# --- answers --------------------------------------------------------------------------------------------


def test_a_prefix_ends_with_the_first_key_that_is_not_promised() -> None:
    world = World()
    world.put(ANN, "ab")
    world.put(ANN, "d")
    assert promised(world.acquire(BOB, "abcd")) == [True, True, False]
    assert world.store.snapshot().totals.acquired_keys == 2


def test_without_prefix_every_key_is_answered() -> None:
    world = World()
    world.put(ANN, "ab")
    world.put(ANN, "d")
    assert promised(world.acquire(BOB, "abcd", prefix=False)) == [True, True, False, True]


def test_a_miss_says_why() -> None:
    world = World(pages=12)
    assert reason_of(world.acquire(BOB, "n")[0]) == MissReason.NEVER_STORED

    world.reserve(ANN, "x", duration_s=10)
    assert world.acquire(BOB, "x") == [Filling()]
    world.after(10)
    assert reason_of(world.acquire(BOB, "x")[0]) == MissReason.EXPIRED

    world.put(ANN, "e")
    fill(world)
    assert reason_of(world.acquire(BOB, "e")[0]) == MissReason.EVICTED

    world.put(ANN, "d")
    world.drop("d")
    assert reason_of(world.acquire(BOB, "d")[0]) == MissReason.EVICTED
    missed = world.store.snapshot().totals.missed_keys
    assert missed == {
        MissReason.NEVER_STORED: 1,
        MissReason.FILLING: 1,
        MissReason.EXPIRED: 1,
        MissReason.EVICTED: 2,
    }


def test_why_is_forgotten_when_the_key_is_stored_again() -> None:
    world = World()
    world.put(ANN, "a")
    world.drop("a")
    world.put(ANN, "a")
    assert promised(world.acquire(BOB, "a")) == [True]
    assert len(world.store._listing.lost) == 0


def test_why_is_remembered_for_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOST_KEYS_MAX", 2)
    world = World()
    for name in "abc":
        world.put(ANN, name)
    world.drop("abc")
    reasons = [reason_of(answer) for answer in world.acquire(BOB, "abc", prefix=False)]
    assert reasons == [MissReason.NEVER_STORED, MissReason.EVICTED, MissReason.EVICTED]


def test_nothing_promised_leaves_no_lease() -> None:
    world = World()
    world.acquire(BOB, "abc", prefix=False)
    assert world.store.snapshot().leases == 0


def test_pages_are_those_of_the_lease_even_after_a_drop() -> None:
    world = World()
    world.put(ANN, "ab")
    leased = world.acquire(BOB, "ab")
    world.drop("a")
    pages = world.store.pages(BOB, Pages(lease_of("lease"), (key_of("b"), key_of("a"), key_of("c"))))
    assert list(pages) == [leased[1], leased[0], Miss(MissReason.EXPIRED)]


# --- dropping -------------------------------------------------------------------------------------------


def test_a_dropped_copy_is_free_at_once_if_nobody_has_it() -> None:
    world = World()
    world.put(ANN, "a")
    world.drop("a")
    assert world.free_pages == 60


def test_a_dropped_copy_goes_when_its_lease_ends() -> None:
    world = World()
    world.put(ANN, "a")
    world.acquire(BOB, "a")
    world.drop("a")
    assert world.acquire(CAT, "a") == [Miss(MissReason.EVICTED)]
    assert world.free_pages == 60 - CHUNK_PAGES
    world.release(BOB)
    assert world.free_pages == 60


def test_a_dropped_key_may_be_stored_anew_while_the_old_copy_is_leased() -> None:
    world = World()
    world.put(ANN, "a")
    (old,) = world.acquire(BOB, "a")
    world.drop("a")
    world.put(ANN, "a")
    (new,) = world.acquire(CAT, "a")
    assert isinstance(old, Resident)
    assert isinstance(new, Resident)
    assert old.generation != new.generation
    assert set(old.extents).isdisjoint(new.extents)
    assert world.acquire(BOB, "a") == [old], "what was promised stays what it was"
    world.release(BOB)
    assert world.acquire(BOB, "a") == [new]


def test_what_is_being_filled_is_not_dropped() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    world.drop("a")
    assert [type(answer).__name__ for answer in world.commit(ANN, {"a": grant})] == ["Committed"]
    assert generation_of(grant)


# --- cold -----------------------------------------------------------------------------------------------


def test_cold_goes_first() -> None:
    world = World(pages=12)
    for name in "abc":
        world.put(ANN, name)
    world.put(ANN, "z", cold=True)
    world.put(ANN, "e")
    assert world.look("abcze") == "abc-e"


def test_cold_that_others_use_is_warm() -> None:
    world = World(pages=12)
    world.put(ANN, "z", cold=True)
    for name in "abc":
        world.put(ANN, name)
    world.acquire(BOB, "z")
    world.release(BOB)
    world.put(ANN, "e")
    assert world.look("abcze") == "-bcze"


def test_a_writer_that_reads_its_own_does_not_make_it_warm() -> None:
    world = World(pages=12)
    world.put(ANN, "z", cold=True)
    for name in "abc":
        world.put(ANN, name)
    world.acquire(ANN, "z")
    world.release(ANN)
    world.put(ANN, "e")
    assert world.look("abcze") == "abc-e"


def test_a_hand_off_that_was_consumed_goes_first() -> None:
    world = World(pages=12)
    for name in "abcd":
        world.put(ANN, name)
    world.acquire(BOB, "d")
    world.release(BOB, cold=True)
    world.put(ANN, "e")
    assert world.look("abcde") == "abc-e"


def test_one_reader_cannot_cool_what_another_used() -> None:
    world = World(pages=12)
    for name in "abcd":
        world.put(ANN, name)
    for reader in (CAT, BOB):
        world.acquire(reader, "d")
    for reader in (CAT, BOB):
        world.release(reader, cold=True)
    world.put(ANN, "e")
    assert world.look("abcde") == "-bcde"


def test_cold_that_another_writer_offers_is_warm() -> None:
    world = World(pages=12)
    world.put(ANN, "z", cold=True)
    for name in "abc":
        world.put(ANN, name)
    world.reserve(BOB, "z", cold=True)
    world.put(ANN, "e")
    assert world.look("abcze") == "-bcze"


# --- paging through -------------------------------------------------------------------------------------


def test_objects_are_listed_page_by_page() -> None:
    world = World()
    world.put(ANN, "abcde")
    world.acquire(BOB, "a")
    first, cursor = world.store.objects(3)
    assert cursor is not None
    rest, end = world.store.objects(3, cursor)
    assert end is None
    assert [view.key for view in (*first, *rest)] == [key_of(name).hex() for name in "abcde"]
    assert (first[0].leases, first[1].leases, first[0].depth, rest[0].depth) == (1, 0, 0, 3)
    assert world.store.objects(5)[1] is None
    assert first[0].namespace == NAMESPACE.hex()
