"""Writers: nothing is visible before its commit, one commit wins, what is given up returns to the free pages."""

import pytest

from kvstore.core import BadRequest, MissReason, Namespace, NamespaceUnknown, limits
from kvstore.wire import Busy, CommitItem, Committed, Exists, Filling, Granted, Refused, Resident, Stale
from tests.store.world import (
    ANN,
    BOB,
    CAT,
    CHUNK_BYTES,
    CHUNK_PAGES,
    NAMESPACE,
    PAGE_TOKENS,
    TABLE,
    TOKEN_BYTES,
    World,
    generation_of,
    items,
    key_of,
    reason_of,
)

NO_ROOM = Refused(MissReason.NO_ROOM)


def pages_of(grant: object) -> int:
    assert isinstance(grant, Granted)
    return sum(count for _, count in grant.extents)


# --- from a reservation to a readable object -----------------------------------------------------------


def test_what_is_committed_can_be_read_at_once() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    assert isinstance(grant, Granted)
    assert world.acquire(BOB, "a") == [Filling()]
    assert world.commit(ANN, {"a": grant}) == [Committed()]
    assert world.acquire(BOB, "a") == [Resident(grant.generation, grant.extents, CHUNK_BYTES, TABLE)]


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        (1, 1),
        (PAGE_TOKENS - 1, 1),
        (PAGE_TOKENS, 1),
        (PAGE_TOKENS + 1, 2),
        (2 * PAGE_TOKENS, 2),
        (40, CHUNK_PAGES),
    ],
)
def test_a_grant_has_the_pages_that_the_size_needs(tokens: int, pages: int) -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a", tokens * TOKEN_BYTES)
    assert pages_of(grant) == pages


def test_answers_come_in_the_order_asked() -> None:
    world = World()
    world.put(ANN, "a")
    world.reserve(BOB, "b")
    assert [type(answer) for answer in world.reserve(ANN, "abc")] == [Exists, Busy, Granted]


@pytest.mark.parametrize(
    "size_bytes", [-TOKEN_BYTES, 0, 1, TOKEN_BYTES - 1, CHUNK_BYTES + 1, CHUNK_BYTES + TOKEN_BYTES]
)
def test_a_size_that_no_object_has_is_refused_before_anything_is_reserved(size_bytes: int) -> None:
    world = World()
    with pytest.raises(BadRequest, match=f"has {size_bytes} bytes"):
        world.store.reserve(ANN, NAMESPACE, [*items("a"), *items("b", size_bytes)], 30)
    assert world.look("ab") == "--"
    assert world.free_pages == 60


def test_a_negative_depth_is_refused() -> None:
    item = items("a")[0]
    bad = type(item)(item.key, item.parent, -1, item.size_bytes)
    with pytest.raises(BadRequest, match="depth"):
        World().store.reserve(ANN, NAMESPACE, [bad], 30)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan")])
def test_a_duration_is_positive(duration_s: float) -> None:
    with pytest.raises(BadRequest, match="positive number of seconds"):
        World().reserve(ANN, "a", duration_s=duration_s)


def test_a_namespace_must_be_opened_in_this_boot() -> None:
    with pytest.raises(NamespaceUnknown, match="say Hello again"):
        World().store.reserve(ANN, Namespace(bytes(32)), items("a"), 30)


def test_generations_are_never_reused() -> None:
    world = World()
    seen = set()
    for _ in range(20):
        (grant,) = world.reserve(ANN, "a")
        seen.add(generation_of(grant))
        world.abort(ANN, "a", grant, quiet=True)
    assert len(seen) == 20
    assert {len(generation) for generation in seen} == {limits.GENERATION_BYTES}


# --- asking twice ---------------------------------------------------------------------------------------


def test_a_repeated_reserve_gives_the_same_grant() -> None:
    world = World()
    first = world.reserve(ANN, "ab")
    assert world.reserve(ANN, "ab") == first
    assert world.free_pages == 60 - 2 * CHUNK_PAGES


def test_a_repeated_reserve_counts_from_the_last_one() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a", duration_s=10)
    world.after(9)
    world.reserve(ANN, "a", duration_s=10)
    world.after(9)
    assert world.commit(ANN, {"a": grant}) == [Committed()]


def test_repeating_does_not_keep_a_reservation_for_ever() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    while world.reserve(ANN, "a") == [grant]:
        world.after(10)
        assert world.now_s <= 1000 + limits.RESERVATION_S_MAX
    assert world.now_s == 1000 + limits.RESERVATION_S_MAX


def test_a_reservation_is_no_longer_than_the_limit() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a", duration_s=1e9)
    world.after(limits.RESERVATION_S_MAX)
    assert world.commit(ANN, {"a": grant}) == [Stale()]


def test_another_writer_is_told_busy() -> None:
    world = World()
    world.reserve(ANN, "a")
    assert world.reserve(BOB, "a") == [Busy()]


def test_a_key_has_one_size() -> None:
    world = World()
    world.reserve(ANN, "a")
    assert world.reserve(ANN, "a", TOKEN_BYTES) == [Busy()]


# --- commit ---------------------------------------------------------------------------------------------


def test_a_repeated_commit_is_answered_alike() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    assert world.commit(ANN, {"a": grant}) == world.commit(ANN, {"a": grant}) == [Committed()]
    assert world.store.snapshot().totals.committed == 1


def test_only_the_writer_commits() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    assert world.commit(BOB, {"a": grant}) == [Stale()]
    assert world.look("a") == "~"


def test_only_this_generation_commits() -> None:
    world = World()
    (old,) = world.reserve(ANN, "a")
    world.abort(ANN, "a", old, quiet=True)
    (new,) = world.reserve(ANN, "a")
    assert world.commit(ANN, {"a": old}) == [Stale()]
    assert world.commit(ANN, {"a": new}) == [Committed()]
    assert world.commit(ANN, {"a": old}) == [Stale()]


def test_the_first_commit_wins() -> None:
    """Ann slept through her reservation; what Bob wrote meanwhile is what readers get."""
    world = World()
    (slow,) = world.reserve(ANN, "a", duration_s=10)
    world.after(10)
    (quick,) = world.reserve(BOB, "a")
    assert world.commit(BOB, {"a": quick}) == [Committed()]
    assert world.commit(ANN, {"a": slow}) == [Stale()]
    (resident,) = world.acquire(ANN, "a")
    assert isinstance(resident, Resident)
    assert resident.generation == generation_of(quick)


def test_a_commit_is_stale_from_the_deadline_on_even_before_a_tick() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a", duration_s=10)
    world.now_s += 10
    assert world.commit(ANN, {"a": grant}) == [Stale()]
    assert world.look("a") == "-"


def test_a_table_of_the_wrong_length_commits_nothing() -> None:
    world = World()
    a, b = world.reserve(ANN, "ab")
    batch = [
        CommitItem(key_of("a"), generation_of(a), TABLE),
        CommitItem(key_of("b"), generation_of(b), TABLE[:-1]),
    ]
    with pytest.raises(BadRequest, match="a table of 31 "):
        world.store.commit(ANN, NAMESPACE, batch)
    assert world.look("ab") == "~~"


# --- giving up ------------------------------------------------------------------------------------------


def test_a_quiet_abort_frees_the_pages_at_once() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    world.abort(ANN, "a", grant, quiet=True)
    assert world.free_pages == 60
    assert world.look("a") == "-"


def test_an_abort_that_is_not_quiet_holds_the_pages() -> None:
    """A late write could still land in them."""
    world = World()
    (grant,) = world.reserve(ANN, "a")
    world.abort(ANN, "a", grant, quiet=False)
    assert (world.free_pages, world.held_pages) == (60 - CHUNK_PAGES, CHUNK_PAGES)
    world.after(limits.HOLD_S - 1)
    assert world.held_pages == CHUNK_PAGES
    world.after(1)
    assert (world.free_pages, world.held_pages) == (60, 0)


def test_a_reservation_that_is_over_is_held_and_then_free() -> None:
    world = World()
    world.reserve(ANN, "a", duration_s=10)
    world.after(10)
    assert (world.free_pages, world.held_pages) == (60 - CHUNK_PAGES, CHUNK_PAGES)
    assert reason_of(world.acquire(BOB, "a")[0]) == MissReason.EXPIRED
    world.after(limits.HOLD_S)
    assert (world.free_pages, world.held_pages) == (60, 0)


def test_who_takes_over_an_expired_reservation_gets_other_pages() -> None:
    world = World()
    (late,) = world.reserve(ANN, "a", duration_s=10)
    world.now_s += 10
    (grant,) = world.reserve(BOB, "a")
    assert isinstance(late, Granted)
    assert isinstance(grant, Granted)
    assert set(late.extents).isdisjoint(grant.extents)


@pytest.mark.parametrize("quiet", [True, False])
def test_an_abort_gives_back_only_what_is_reserved(quiet: bool) -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    world.abort(BOB, "a", grant, quiet=quiet)
    assert world.look("a") == "~"
    world.commit(ANN, {"a": grant})
    world.abort(ANN, "a", grant, quiet=quiet)
    world.abort(ANN, "b", grant, quiet=quiet)
    assert world.look("a") == "a"
    assert world.free_pages == 60 - CHUNK_PAGES


def test_aborting_twice_is_aborting_once() -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    world.abort(ANN, "a", grant, quiet=False)
    world.abort(ANN, "a", grant, quiet=True)
    assert world.held_pages == CHUNK_PAGES
    assert world.store.snapshot().totals.aborted == 1


# --- room -----------------------------------------------------------------------------------------------


def test_room_is_made_by_evicting_the_least_recently_used() -> None:
    world = World(pages=12)
    for name in "abcd":
        world.put(ANN, name)
    assert world.free_pages == 0
    world.put(ANN, "e")
    assert world.look("abcde") == "-bcde"
    assert reason_of(world.acquire(BOB, "a")[0]) == MissReason.EVICTED


def test_writing_never_evicts_what_it_continues() -> None:
    """A prompt longer than the arena stores its beginning, which is what a later one can use."""
    world = World(pages=12)
    for end in range(1, 5):
        world.put(ANN, "abcd"[:end])
    assert world.reserve(ANN, "abcde")[-1] == NO_ROOM
    assert world.look("abcd") == "abcd"


def test_a_child_being_written_keeps_its_parent() -> None:
    world = World(pages=12)
    world.put(ANN, "a")
    world.put(BOB, "x")
    world.put(BOB, "y")
    world.reserve(ANN, "ab")
    assert [type(answer) for answer in world.reserve(BOB, "z")] == [Granted]
    assert world.look("a") == "a"


def test_what_is_offered_again_is_not_the_next_to_go() -> None:
    world = World(pages=12)
    for name in "abcd":
        world.put(ANN, name)
    assert world.reserve(BOB, "a") == [Exists()]
    world.put(ANN, "e")
    assert world.look("abcde") == "a-cde"


def test_a_plan_that_is_not_enough_is_not_carried_out() -> None:
    world = World(pages=4)
    world.put(ANN, "a", TOKEN_BYTES)
    world.put(ANN, "b")
    world.acquire(BOB, "b")
    assert world.reserve(ANN, "c") == [NO_ROOM]
    assert world.look("ab") == "ab"


def test_pages_that_are_too_scattered_are_gathered_by_evicting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three free pages, no two of them adjacent, and an object of three pages in at most two extents."""
    world = World(pages=6)
    monkeypatch.setattr(world.store._listing.dram._allocator, "_extents_max", 2)
    for name in "abcdef":
        world.put(ANN, name, TOKEN_BYTES)
    for name in "ace":
        world.drop(name)
    assert world.free_pages == 3
    assert pages_of(world.reserve(ANN, "g")[0]) == CHUNK_PAGES
    assert world.look("bdf") == "-df"


def test_what_was_spared_once_is_not_spared_for_ever() -> None:
    """Room for b may not cost its parent a; when that attempt has failed, a may go like any other."""
    world = World(pages=12)
    for name in "axyz":
        world.put(ANN, name)
    world.acquire(BOB, "xy", prefix=False)
    world.acquire(CAT, "z")
    assert world.store.reserve(ANN, NAMESPACE, items("ab")[1:], 30) == (NO_ROOM,)
    world.release(BOB)
    world.release(CAT)
    for name in "stuv":
        world.put(ANN, name)
    assert world.look("axyzstuv") == "----stuv"


def test_a_batch_does_not_evict_its_own_chain() -> None:
    """c and d are there, b is not: room for b is made elsewhere, or not at all."""
    world = World(pages=12)
    for end in range(1, 5):
        world.put(ANN, "abcd"[:end])
    world.drop("b")
    world.put(ANN, "x")
    assert [type(answer) for answer in world.reserve(BOB, "abcd")] == [Exists, Granted, Exists, Exists]
    assert world.look("abcdx") == "a~cd-"


def test_cycles_of_parents_cannot_make_objects_immortal() -> None:
    """A faulty client names two chunks each other's parent."""
    world = World(pages=6)
    a, b = items("ab")
    grants = world.store.reserve(ANN, NAMESPACE, [type(a)(a.key, b.key, 1, a.size_bytes), b], 30)
    world.commit(ANN, dict(zip("ab", grants, strict=True)))
    assert world.look("ab") == "ab"
    world.put(ANN, "c")
    world.put(ANN, "d")
    assert world.look("ab") == "--"
