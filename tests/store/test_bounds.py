"""What is told, what is bounded, and what goes by itself."""

from collections.abc import Callable

import pytest

from kvstore.core import BadRequest, Manifest, MissReason, Namespace, Overloaded, Tier, limits
from kvstore.store import TierUse
from kvstore.wire import Acquire, ClientId, Miss, Report, ReportItem
from tests.store.world import (
    ANN,
    BOB,
    CHUNK_BYTES,
    CHUNK_PAGES,
    MANIFEST,
    NAMESPACE,
    PAGE_BYTES,
    World,
    generation_of,
    items,
    key_of,
    lease_of,
)

# --- watches --------------------------------------------------------------------------------------------


class Watcher:
    """Counts calls."""

    def __init__(self, world: World, names: str) -> None:
        self.calls = 0
        self.cancel = world.store.watch(NAMESPACE, [key_of(name) for name in names], self.call)

    def call(self) -> None:
        self.calls += 1


def test_a_commit_calls_once_whoever_watches_one_of_its_keys() -> None:
    world = World()
    one, other, stranger = Watcher(world, "xab"), Watcher(world, "b"), Watcher(world, "y")
    world.put(ANN, "ab")
    assert (one.calls, other.calls, stranger.calls) == (1, 1, 0)
    world.drop("ab")
    world.put(ANN, "ab")
    assert (one.calls, other.calls, stranger.calls) == (1, 1, 0)


def test_what_is_committed_can_be_had_when_the_callback_comes() -> None:
    world = World()
    seen: list[object] = []
    world.store.watch(NAMESPACE, [key_of("a")], lambda: seen.extend(world.acquire(BOB, "a")))
    world.put(ANN, "a")
    assert [type(answer).__name__ for answer in seen] == ["Resident"]


@pytest.mark.parametrize("quiet", [True, False])
def test_an_abort_calls(quiet: bool) -> None:
    world = World()
    (grant,) = world.reserve(ANN, "a")
    watcher = Watcher(world, "a")
    world.abort(ANN, "a", grant, quiet=quiet)
    assert watcher.calls == 1


def test_the_end_of_a_reservation_calls() -> None:
    world = World()
    world.reserve(ANN, "a", duration_s=10)
    watcher = Watcher(world, "a")
    world.after(9)
    assert watcher.calls == 0
    world.after(1)
    assert watcher.calls == 1


def test_a_refusal_calls() -> None:
    world = World(pages=2)
    watcher = Watcher(world, "a")
    world.reserve(ANN, "a")
    assert watcher.calls == 1


def test_who_cancels_is_not_called() -> None:
    world = World()
    watcher = Watcher(world, "ab")
    watcher.cancel()
    watcher.cancel()
    world.put(ANN, "ab")
    assert watcher.calls == 0
    assert world.store.snapshot().watched_keys == 0


def test_a_callback_may_cancel_the_next_one() -> None:
    world = World()
    cancels: list[Callable[[], None]] = []

    def cancel_the_next() -> None:
        cancels[0]()

    world.store.watch(NAMESPACE, [key_of("a")], cancel_the_next)
    second = Watcher(world, "a")
    cancels.append(second.cancel)
    world.put(ANN, "a")
    assert second.calls == 0


def test_watched_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WATCHED_KEYS_MAX", 3)
    world = World()
    first, over = Watcher(world, "ab"), Watcher(world, "ac")
    world.put(ANN, "a")
    assert (first.calls, over.calls) == (1, 0)
    last = Watcher(world, "abc")
    world.put(ANN, "b")
    assert last.calls == 1


# --- the index hears ------------------------------------------------------------------------------------


def test_what_changes_is_dirty() -> None:
    world = World(pages=12)
    world.put(ANN, "a")
    assert world.dirty == [key_of("a")]
    world.drop("a")
    assert world.dirty == [key_of("a")] * 2
    for name in "bcdef":
        world.put(ANN, name)
    assert world.dirty[2:] == [key_of(name) for name in "bcdebf"], "an eviction, too"


def test_a_miss_is_dirty_so_that_the_index_unlearns() -> None:
    world = World()
    world.acquire(BOB, "n")
    assert world.dirty == [key_of("n")]


def test_what_is_told_of_a_key_is_what_an_acquire_would_say() -> None:
    world = World()
    world.put(ANN, "ab")
    world.reserve(ANN, "c")
    world.acquire(BOB, "b")
    world.drop("b")
    assert [world.store.tier_of(key_of(name)) for name in "abcd"] == [Tier.DRAM, None, None, None]
    assert list(world.store.keys()) == [key_of("a"), key_of("c")], "c is being filled, b was dropped"


def test_the_store_may_change_while_its_keys_are_gone_through() -> None:
    world = World()
    world.put(ANN, "abc")
    keys = world.store.keys()
    assert next(keys) == key_of("a")
    world.drop("b")
    world.put(ANN, "d")
    assert list(keys) == [key_of("b"), key_of("c")], "those that there were"


# --- by itself ------------------------------------------------------------------------------------------


def test_a_share_of_the_pages_is_kept_free_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVICTED_PAGES_PER_TICK_MAX", 4)
    world = World(pages=200)
    for number in range(200):
        world.put(ANN, [f"key{number}"], PAGE_BYTES)
    assert world.free_pages == 0
    free = []
    for _ in range(4):
        world.after(0.1)
        free.append(world.free_pages)
    assert free == [4, 8, 10, 10]
    assert world.store.snapshot().totals.evicted == 10
    assert world.store.snapshot().totals.evicted_bytes == 10 * PAGE_BYTES


def test_ends_come_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPIRIES_PER_TICK_MAX", 2)
    world = World()
    for name in "abc":
        world.put(ANN, name)
        world.acquire(BOB, name, name, duration_s=10)
        world.reserve(ANN, [name + name], duration_s=10)
    world.after(10)
    assert (world.store.snapshot().leases, world.store.snapshot().reservations) == (1, 1)
    world.after(0)
    assert (world.store.snapshot().leases, world.store.snapshot().reservations) == (0, 0)
    assert world.store.snapshot().totals.expired_leases == 3
    assert world.store.snapshot().totals.expired_reservations == 3


def test_what_has_ended_does_not_pile_up() -> None:
    """Reservations and leases that ended early leave records behind until their deadlines; they are swept out."""
    world = World()
    (item,) = items("a")
    for _ in range(3000):
        (grant,) = world.store.reserve(ANN, NAMESPACE, [item], 30)
        world.store.abort(ANN, NAMESPACE, [(item.key, generation_of(grant))], True)
    assert len(world.store._writing._deadlines._heap) < 2000
    world.after(30)
    assert world.store.snapshot().totals.expired_reservations == 0


# --- bounds ---------------------------------------------------------------------------------------------


def client(number: int) -> ClientId:
    return ClientId(number.to_bytes(16, "big"))


def test_idle_clients_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLIENTS_MAX", 3)
    world = World()
    world.put(client(0), "a")
    world.acquire(client(0), "a")
    world.reserve(client(1), "b")
    for number in range(2, 10):
        world.acquire(client(number), "a", "look")
        world.release(client(number), "look")
    assert world.store.snapshot().clients == 3
    world.acquire(client(10), "a")
    with pytest.raises(Overloaded, match="3 clients hold"):
        world.acquire(client(11), "a")
    world.release(client(0))
    world.acquire(client(11), "a")


def test_a_client_whose_pages_are_held_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would have a fresh share while its last writes may still land."""
    monkeypatch.setattr(limits, "CLIENTS_MAX", 1)
    world = World()
    (grant,) = world.reserve(ANN, "a")
    world.abort(ANN, "a", grant, quiet=False)
    with pytest.raises(Overloaded):
        world.reserve(BOB, "b")
    world.after(limits.HOLD_S)
    world.reserve(BOB, "b")


def manifest(number: int) -> Manifest:
    return Manifest(
        weights=str(number),
        model={},
        kv_dtype="bfloat16",
        tile_format="test",
        chunk_tokens=16,
        unit_tokens=16,
        lanes=((1, 1, PAGE_BYTES * 3),),
    )


def test_namespaces_without_objects_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_MAX", 2)
    world = World()
    world.put(ANN, "a")
    for number in range(5):
        other = manifest(number)
        assert world.store.open_namespace(other.namespace, other.encode()) == ""
    assert world.store.snapshot().namespaces == 2
    assert world.look("a") == "a"
    last = manifest(4)
    item = items("b", PAGE_BYTES * 3)[0]
    world.store.reserve(ANN, last.namespace, [item], 30)
    with pytest.raises(Overloaded, match="2 namespaces hold objects"):
        world.store.open_namespace(manifest(9).namespace, manifest(9).encode())


def test_opening_again_changes_nothing() -> None:
    world = World()
    world.put(ANN, "a")
    world.store.open_namespace(NAMESPACE, MANIFEST.encode())
    world.store.audit()
    assert world.look("a") == "a"


def test_a_manifest_that_hashes_to_something_else_is_refused() -> None:
    with pytest.raises(BadRequest, match="hashes to"):
        World().store.open_namespace(Namespace(bytes(32)), MANIFEST.encode())


def test_a_namespace_does_not_see_another_ones_keys() -> None:
    """A key belongs to one namespace; a client that mixes them up gets a miss."""
    world = World()
    world.put(ANN, "a")
    other = manifest(1)
    world.store.open_namespace(other.namespace, other.encode())
    (answer,) = world.store.acquire(BOB, Acquire(other.namespace, (key_of("a"),), lease_of("x"), 30))
    assert answer == Miss(MissReason.NEVER_STORED)
    item = items("a", PAGE_BYTES * 3)[0]
    with pytest.raises(BadRequest, match="belongs to another namespace"):
        world.store.reserve(BOB, other.namespace, [item], 30)


# --- counting -------------------------------------------------------------------------------------------


def report(world: World, request: str, queried: int, pulled: int, reason: MissReason | None = None) -> None:
    item = ReportItem(request, queried, pulled, pulled, reason)
    world.store.report(ANN, Report((item,)))


def test_tokens_are_counted_once_for_each_request() -> None:
    world = World()
    report(world, "one", 1000, 600, MissReason.EVICTED)
    report(world, "one", 1000, 600, MissReason.EVICTED)
    report(world, "two", 1000, 1000)
    world.store.report(BOB, Report((ReportItem("one", 500, 0, 0, MissReason.EVICTED),)))
    snapshot = world.store.snapshot()
    assert (snapshot.totals.queried_tokens, snapshot.totals.hit_tokens, snapshot.totals.reports) == (
        2500,
        1600,
        3,
    )
    assert snapshot.totals.missed_tokens == {MissReason.EVICTED: 900}
    assert snapshot.hit_rate == 0.64


def test_every_queried_token_is_a_hit_or_a_miss() -> None:
    """Also the rest of a prompt, less than an engine block, which nobody could store."""
    world = World()
    report(world, "one", 1000, 900)
    report(world, "two", 1000, 300, MissReason.NEVER_STORED)
    totals = world.store.snapshot().totals
    assert totals.missed_tokens == {MissReason.TOO_SHORT: 100, MissReason.NEVER_STORED: 700}
    assert totals.hit_tokens + sum(totals.missed_tokens.values()) == totals.queried_tokens


def test_a_report_that_cannot_be_is_refused() -> None:
    world = World()
    for queried, pulled in [(10, 11), (10, -1), (-1, -1)]:
        with pytest.raises(BadRequest, match="tokens pulled of"):
            report(world, "one", queried, pulled)
    with pytest.raises(BadRequest):
        world.store.report(BOB, Report((ReportItem("one", 10, 5, 5, None, 6),)))
    assert world.store.snapshot().totals.reports == 0
    assert world.store.snapshot().hit_rate == 0.0


def test_a_snapshot_does_not_change_with_the_store() -> None:
    world = World()
    world.put(ANN, "a")
    before = world.store.snapshot()
    world.acquire(BOB, "an")
    world.put(ANN, "b")
    assert before.totals.committed == 1
    assert before.totals.missed_keys == {}
    assert before.leases == 0


def test_a_snapshot_says_what_is_held_now() -> None:
    world = World()
    world.put(ANN, "ab")
    world.acquire(BOB, "b")
    world.reserve(ANN, "c")
    (grant,) = world.reserve(ANN, "d")
    world.abort(ANN, "d", grant, quiet=False)
    snapshot = world.store.snapshot()
    assert (snapshot.leases, snapshot.reservations, snapshot.namespaces, snapshot.clients) == (1, 1, 1, 2)
    assert snapshot.tiers[Tier.DRAM] == TierUse(
        objects=2,
        object_bytes=2 * CHUNK_BYTES,
        page_bytes=PAGE_BYTES,
        pages=60,
        free_pages=60 - 4 * CHUNK_PAGES,
        held_pages=CHUNK_PAGES,
        reserved_pages=CHUNK_PAGES,
        leased_pages=CHUNK_PAGES,
    )
    assert repr(world.store) == "<Store 2 objects, 48/60 pages free>"


def test_reports_are_remembered_for_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPORTS_REMEMBERED_MAX", 3)
    world = World()
    for number in range(5):
        report(world, f"r{number}", 1000, 600, MissReason.EVICTED)
    log = world.store.reports()
    assert [name for (_, name), _ in log.entries] == ["r2", "r3", "r4"]
    assert log.of("r1") == []
    [view] = log.of("r4")
    assert (view.client, view.queried, view.pulled, view.missed) == (ANN.hex(), 1000, 600, 400)
