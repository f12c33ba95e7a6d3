"""The meters: what is counted as pushed and pulled, and that the store's answers are not changed."""

import asyncio

import pytest

from kvstore.core import Key, Manifest, MissReason, limits
from kvstore.node.heart import TICK_S, Heart
from kvstore.node.metered import UNDER_WAY_MAX, MeteredStore, Pushes
from kvstore.policy import Lru
from kvstore.wire import (
    Acquire,
    ClientId,
    CommitItem,
    Committed,
    Generation,
    Granted,
    LeaseId,
    Refused,
    Release,
    ReserveItem,
    Resident,
)
from tests.support import wait_until_async

MANIFEST = Manifest(
    weights="w",
    model={},
    kv_dtype="f",
    tile_format="t",
    chunk_tokens=16,
    unit_tokens=1,
    lanes=((1, 1, 4096),),
)
SIZE = MANIFEST.geometry.object_bytes(16)
CLIENT = ClientId(b"c" * limits.CLIENT_ID_BYTES)
LEASE = LeaseId(b"l" * limits.LEASE_ID_BYTES)


def key(number: int) -> Key:
    return Key(number.to_bytes(limits.KEY_BYTES, "big"))


class Bench:
    """A metered store in virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.opened: list[bytes] = []
        self.store = MeteredStore(
            64, SIZE, Lru(), lambda: self.now_s, lambda _, manifest: self.opened.append(manifest)
        )
        self.store.open_namespace(MANIFEST.namespace, MANIFEST.encode())

    def reserve(self, *numbers: int):
        items = [ReserveItem(key(number), Key(MANIFEST.namespace), 0, SIZE) for number in numbers]
        return self.store.reserve(CLIENT, MANIFEST.namespace, items, 100.0)

    def commit(self, number: int, granted: Granted):
        item = CommitItem(key(number), granted.generation, bytes(limits.CHECKSUM_BYTES))
        return self.store.commit(CLIENT, MANIFEST.namespace, [item])

    def acquire(self, *numbers: int):
        keys = tuple(key(number) for number in numbers)
        return self.store.acquire(CLIENT, Acquire(MANIFEST.namespace, keys, LEASE, 60.0))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_push_lasts_from_the_grant_to_its_first_commit(bench) -> None:
    """Mutants: counted at the grant; counted again when the commit is repeated."""
    (granted,) = bench.reserve(1)
    assert isinstance(granted, Granted)
    assert bench.store.pushes.freeze().objects == 0
    bench.now_s = 2.0
    for _ in range(2):
        assert bench.commit(1, granted) == (Committed(),)
    pushed = bench.store.pushes.freeze()
    assert (pushed.objects, pushed.object_bytes, pushed.seconds.total) == (1, SIZE, 2.0)


def test_a_pull_lasts_from_the_lease_to_the_release_of_its_key(bench) -> None:
    for number, granted in zip((1, 2), bench.reserve(1, 2), strict=True):
        bench.commit(number, granted)
    bench.now_s = 1.0
    assert all(isinstance(answer, Resident) for answer in bench.acquire(1, 2))
    bench.now_s = 1.5
    bench.store.release(CLIENT, Release(LEASE, (key(1),)))
    bench.store.release(CLIENT, Release(LEASE, (key(1),)))
    pulled = bench.store.pulls.freeze()
    assert (pulled.objects, pulled.object_bytes, pulled.seconds.total) == (1, SIZE, 0.5)
    bench.now_s = 2.0
    bench.store.release(CLIENT, Release(LEASE))
    pulled = bench.store.pulls.freeze()
    assert (pulled.objects, pulled.object_bytes, pulled.seconds.total) == (2, 2 * SIZE, 1.5)


def test_refusals_are_counted_by_reason(bench) -> None:
    answers = bench.reserve(*range(64))
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert refused
    assert sum(bench.store.refused.values()) == len(refused)
    assert set(bench.store.refused) == {answer.reason for answer in refused} <= set(MissReason)


def test_an_opened_namespace_is_passed_on(bench) -> None:
    assert bench.opened == [MANIFEST.encode()]


def test_what_is_never_committed_is_forgotten() -> None:
    pushes = Pushes(lambda: 0.0)
    for number in range(UNDER_WAY_MAX + 1):
        pushes.begin([(Generation(number.to_bytes(8, "big")), 1)])
    for number, counted in ((0, 0), (1, 1)):
        pushes.end([Generation(number.to_bytes(8, "big"))])
        assert pushes.freeze().objects == counted


def test_what_is_not_given_back_is_no_pull(bench) -> None:
    """Mutant: counted when it is promised, or when its lease has ended by itself."""
    bench.commit(1, *bench.reserve(1))
    bench.acquire(1)
    bench.now_s = 61.0
    bench.store.release(CLIENT, Release(LEASE))
    assert bench.store.pulls.freeze().objects == 0


async def test_the_heart_ticks_measures_and_publishes() -> None:

    ticks, views = [], []
    heart = Heart(lambda: ticks.append(1), lambda: views.append(heart.lag.freeze()))
    task = asyncio.create_task(heart.run())
    await wait_until_async(lambda: len(views) == 2, deadline_s=100 * TICK_S)
    task.cancel()
    assert len(ticks) >= 10
    assert sum(views[-1].counts) >= 10
