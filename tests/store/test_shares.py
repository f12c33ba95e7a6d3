"""Shares: everything a client can hold is bounded in pages, alone and among others, and refusing is an answer.

Mutants that must fail here: a share of all instead of half among others; no floor; objects counted once per lease.
"""

import pytest

from kvstore.core import MissReason, Tier, limits
from kvstore.wire import ClientId, Exists, Granted, Miss, Refused, Resident
from tests.store.world import ANN, BOB, CAT, CHUNK_PAGES, World

NO_ROOM = Refused(MissReason.NO_ROOM)
NAMES = [f"key{number}" for number in range(64)]


def granted(world: World, client: ClientId, names: list[str]) -> int:
    """How many of these the client may reserve."""
    answers = [world.reserve(client, [name])[0] for name in names]
    assert all(isinstance(answer, Granted) or answer == NO_ROOM for answer in answers)
    return sum(isinstance(answer, Granted) for answer in answers)


def leased(world: World, client: ClientId, names: list[str], lease: str = "lease") -> int:
    """How many of these the client may lease."""
    answers = world.acquire(client, names, lease, prefix=False)
    assert all(isinstance(answer, Resident) or answer == Miss(MissReason.LEASE_LIMIT) for answer in answers)
    return sum(isinstance(answer, Resident) for answer in answers)


def store_all(world: World, count: int) -> None:
    """Objects that the test does not want to know how they came."""
    for name in NAMES[:count]:
        world.put(ANN, [name])
    world.after(limits.CLIENT_ACTIVE_S)


# 150 pages: 30 % are 45 pages or 15 chunks, half of that 7; 60 % are 90 pages or 30 chunks, half of that 15.


def test_a_writer_alone_may_reserve_the_whole_share() -> None:
    assert granted(World(pages=150), ANN, NAMES) == 15


def test_among_others_a_writer_may_reserve_half_of_it() -> None:
    world = World(pages=150)
    world.put(ANN, ["first"])
    world.reserve(BOB, ["other"])
    assert granted(world, ANN, NAMES) == 7


def test_writers_that_never_committed_share_one_half() -> None:
    """The lives of a pusher in a crash loop: each is a new client, and none is heard of again."""
    world = World(pages=150)
    world.put(ANN, ["first"])
    lives = [ClientId(bytes([life]) * limits.CLIENT_ID_BYTES) for life in range(1, 5)]
    had = [granted(world, life, NAMES[8 * n : 8 * n + 8]) for n, life in enumerate(lives)]
    assert had == [7, *[limits.OBJECTS_PER_CLIENT_MIN] * 3]
    assert granted(world, ANN, NAMES[40:]) == 7
    assert granted(world, BOB, ["bob", "bobby", "robert"]) == limits.OBJECTS_PER_CLIENT_MIN


def test_others_do_not_count_when_they_have_been_silent() -> None:
    world = World(pages=150)
    world.release(BOB)
    world.after(limits.CLIENT_ACTIVE_S)
    assert granted(world, ANN, NAMES) == 15


def test_all_together_stay_within_the_share() -> None:
    """Ann took it all while she was alone; what is left to Bob is what every client may always have."""
    world = World(pages=150)
    assert granted(world, ANN, NAMES[:32]) == 15
    assert granted(world, BOB, NAMES[32:]) == limits.OBJECTS_PER_CLIENT_MIN


def test_held_pages_count_as_reserved_ones() -> None:
    world = World(pages=150)
    for name in NAMES[:15]:
        (grant,) = world.reserve(ANN, [name])
        world.abort(ANN, name, grant, quiet=False)
    assert world.reserve(ANN, ["more"]) == [NO_ROOM]
    world.after(limits.HOLD_S)
    assert granted(world, ANN, NAMES) == 15


def test_held_pages_of_one_count_for_all() -> None:
    world = World(pages=150)
    world.put(ANN, ["first"])
    for name in NAMES[:15]:
        (grant,) = world.reserve(ANN, [name])
        world.abort(ANN, name, grant, quiet=False)
    assert granted(world, BOB, NAMES[32:]) == limits.OBJECTS_PER_CLIENT_MIN


def test_what_is_committed_does_not_count_as_reserved() -> None:
    world = World(pages=150)
    store_all(world, 20)
    assert granted(world, ANN, NAMES[20:]) == 15


def test_refusing_a_share_evicts_nothing() -> None:
    world = World(pages=60)
    store_all(world, 14)
    assert granted(world, ANN, NAMES[14:40]) == 6
    assert len(list(filter(world.store.tier_of, world.store.keys()))) == 14


def test_an_arena_of_four_chunks_still_lets_a_client_have_two() -> None:
    world = World(pages=4 * CHUNK_PAGES)
    assert granted(world, ANN, NAMES) == limits.OBJECTS_PER_CLIENT_MIN
    assert "holds 4 chunks of this model" in world.advice
    assert "give the node at least 1 MiB" in world.advice


def test_a_reader_alone_may_lease_the_whole_share() -> None:
    world = World(pages=150)
    store_all(world, 40)
    assert leased(world, BOB, NAMES[:40]) == 30


def test_among_others_a_reader_may_lease_half_of_it() -> None:
    world = World(pages=150)
    store_all(world, 40)
    world.release(CAT)
    assert leased(world, BOB, NAMES[:40]) == 15


def test_what_two_readers_share_counts_once_for_all() -> None:
    world = World(pages=150)
    store_all(world, 40)
    assert leased(world, BOB, NAMES[:30]) == 30
    assert leased(world, CAT, NAMES[:15]) == 15
    assert world.store.snapshot().tiers[Tier.DRAM].leased_pages == 90


def test_what_two_leases_of_one_reader_share_counts_once() -> None:
    world = World(pages=150)
    store_all(world, 40)
    assert leased(world, BOB, NAMES[:30], "one") == 30
    assert leased(world, BOB, NAMES[:30], "two") == 30
    world.release(BOB, "one")
    assert leased(world, BOB, NAMES[30:31], "two") == 0
    world.release(BOB, "two")
    assert leased(world, BOB, NAMES[30:31], "three") == 1


def test_every_reader_may_lease_two_chunks() -> None:
    world = World(pages=150)
    store_all(world, 40)
    assert leased(world, BOB, NAMES[:30]) == 30
    assert leased(world, CAT, NAMES[30:40]) == limits.OBJECTS_PER_CLIENT_MIN


def test_exists_is_said_only_when_an_acquire_would_be_promised() -> None:
    world = World(pages=150)
    store_all(world, 40)
    assert leased(world, BOB, NAMES[:30]) == 30
    assert world.reserve(BOB, NAMES[:1]) == [Exists()]
    assert world.reserve(BOB, NAMES[30:31]) == [Refused(MissReason.LEASE_LIMIT)]
    assert leased(world, BOB, NAMES[30:31]) == 0


def test_leases_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASES_PER_CLIENT_MAX", 2)
    world = World()
    store_all(world, 1)
    assert [leased(world, BOB, NAMES[:1], name) for name in ("one", "two", "three", "one")] == [1, 1, 0, 1]
    world.release(BOB, "one")
    assert leased(world, BOB, NAMES[:1], "three") == 1


def test_in_a_full_house_new_objects_do_not_push_each_other_out() -> None:
    """All that is older is leased: what was acknowledged a moment ago stays, and newer things are refused."""
    world = World(pages=40 * CHUNK_PAGES)
    store_all(world, 38)
    for number in range(19):
        reader = ClientId(bytes([number + 1]) * limits.CLIENT_ID_BYTES)
        assert leased(world, reader, NAMES[2 * number : 2 * number + 2]) == 2
    world.after(1)
    new = ["new1", "new2"]
    for name in new:
        world.put(ANN, [name])
    assert world.reserve(ANN, ["newer"]) == [NO_ROOM]
    world.after(limits.YOUNG_S - 1)
    assert leased(world, BOB, new) == 2
    world.release(BOB)
    world.after(1)
    assert granted(world, ANN, ["newer"]) == 1
