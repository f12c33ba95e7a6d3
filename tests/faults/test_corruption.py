"""Flipped bits: exactly the damaged objects miss, all others hit; the copy is dropped, a new push accepted at once.

Mutants that must fail here: a pull that compares nothing; a table that is computed from what was read; a
suspected copy that is believed bad unseen, or that stays.
"""

import ctypes
import random
from collections.abc import Iterator, Sequence

import pytest

from kvstore.client import Resident
from kvstore.core import Key
from kvstore.transfer import Piece
from tests.faults.flipping import FlippingTransfer, harmless
from tests.faults.support import ArenaWindow, Engine, chain, extents_of, make_transfer, shape
from tests.support import wait_until
from tests.support.node import RunningNode, running_node

pytestmark = pytest.mark.process

OBJECT_BYTES = 96 << 10  # a page and a half
PAGE_BYTES = 64 << 10
OBJECTS = 40
DAMAGED = 8
MANIFEST = shape(OBJECT_BYTES, "corruption")


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[RunningNode]:
    folder = tmp_path_factory.mktemp("corruption")
    with running_node(folder, dram_size_bytes="64MiB", dram_page_bytes=PAGE_BYTES) as running:
        yield running


@pytest.fixture(scope="module", params=["mooncake", "shm"])
def transfer(request) -> Iterator[FlippingTransfer]:
    real = make_transfer(request.param)
    yield FlippingTransfer(real)
    real.close()


@pytest.fixture(scope="module")
def engine(node, transfer) -> Iterator[Engine]:
    with Engine(node.control, MANIFEST, transfer=transfer) as running:
        yield running


@pytest.fixture
def rng(request) -> random.Random:
    return random.Random(request.node.name)


def prompts(rng: random.Random, count: int) -> list[Key]:
    """The first keys of so many prompts: none depends on another."""
    return [chain(MANIFEST.namespace, 1, rng.randrange(1 << 30))[0] for _ in range(count)]


def put(engine: Engine, keys: Sequence[Key]) -> None:
    assert all(engine.put([key]) == [key] for key in keys)


def had(engine: Engine, keys: Sequence[Key]) -> set[Key]:
    """Those of the keys whose objects can be had; all of them are right, or `Wrong` is raised."""
    return {key for key in keys if engine.get([key]) == 1}


def bad_copies(node: RunningNode) -> int:
    return int(node.stats()["store"]["totals"]["bad_copies"])


def dropped(node: RunningNode, before: int, count: int) -> bool:
    return bad_copies(node) == before + count


def test_bits_that_flip_in_the_arena_cost_exactly_their_objects(node, engine, rng) -> None:
    before = bad_copies(node)
    keys = prompts(rng, OBJECTS)
    put(engine, keys)
    damaged = set(rng.sample(keys, DAMAGED))
    with ArenaWindow(node, PAGE_BYTES) as arena:
        for number, key in enumerate(damaged):
            promise = engine.acquire([key])
            answer = promise.copies[0].answer
            assert isinstance(answer, Resident)
            edges = [0, OBJECT_BYTES - 1, PAGE_BYTES - 1, PAGE_BYTES]
            at = edges[number] if number < len(edges) else rng.randrange(OBJECT_BYTES)
            arena.flip(extents_of(answer.extents), at)
            engine.release(promise)
    assert had(engine, keys) == set(keys) - damaged
    wait_until(lambda: dropped(node, before, DAMAGED), 5, "the node has dropped what is damaged")
    assert [len(engine.acquire([key])) for key in damaged] == [0] * DAMAGED
    put(engine, list(damaged))
    assert had(engine, keys) == set(keys)


def test_bits_that_flip_on_the_way_to_a_reader_cost_that_reader_only(node, engine, transfer, rng) -> None:
    """The copy is sound: the node says so, and keeps it."""
    before, seen = bad_copies(node), 0
    keys = prompts(rng, 10)
    put(engine, keys)

    def damage(pieces: Sequence[Piece]) -> None:
        nonlocal seen
        seen += 1
        flip(pieces, rng)

    transfer.received = damage
    try:
        assert had(engine, keys) == set()
    finally:
        transfer.received = harmless
    assert seen == len(keys)
    assert had(engine, keys) == set(keys)
    assert bad_copies(node) == before


def test_bits_that_flip_on_the_way_to_the_node_cost_that_object_only(node, engine, transfer, rng) -> None:
    before, seen = bad_copies(node), 0
    keys = prompts(rng, 10)
    damaged = set(rng.sample(keys, 3))
    with ArenaWindow(node, PAGE_BYTES) as arena:
        for key in keys:
            (grant,) = engine.reserve([key])
            assert grant.granted is not None
            assert grant.address is not None
            results = engine.push(grant.address, [grant])
            if key in damaged:
                seen += 1
                arena.flip(extents_of(grant.granted.extents), rng.randrange(OBJECT_BYTES))
            assert engine.commit([grant], results) == [key]
    assert seen == len(damaged)
    assert had(engine, keys) == set(keys) - damaged
    wait_until(lambda: dropped(node, before, len(damaged)), 5, "the node has dropped what is damaged")
    put(engine, list(damaged))
    assert had(engine, keys) == set(keys)


def test_bits_that_flip_in_staging_while_they_are_sent_cost_that_object_only(
    node, engine, transfer, rng
) -> None:
    """The object went out as it was, its hashes are those of the damaged bytes."""
    before = bad_copies(node)
    keys = prompts(rng, 10)
    damaged = set(rng.sample(keys, 3))
    coming = iter(keys)

    def damage(pieces: Sequence[Piece]) -> None:
        if next(coming) in damaged:
            flip(pieces, rng)

    transfer.sent = damage
    try:
        put(engine, keys)
    finally:
        transfer.sent = None
    assert next(coming, None) is None, "not all writes went through the damage"
    assert had(engine, keys) == set(keys) - damaged
    wait_until(lambda: dropped(node, before, len(damaged)), 5, "the node has dropped what is damaged")
    put(engine, list(damaged))
    assert had(engine, keys) == set(keys)


def flip(pieces: Sequence[Piece], rng: random.Random) -> None:
    """Flips a bit of the local bytes of a transfer."""
    piece = rng.choice(pieces)
    at = piece.local_address + rng.randrange(piece.size_bytes)
    byte = ctypes.c_ubyte.from_address(at)
    byte.value ^= 1 << rng.randrange(8)
