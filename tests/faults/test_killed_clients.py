"""kill -9 of pushers and pullers at any moment leaks nothing beyond duration + hold, and keeps nobody out.

Mutants that must fail here: a reservation that does not expire; held pages that are never freed; a lease
that nothing ends; a client's account that is never forgotten.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.faults.clients import (
    MANIFEST,
    OBJECTS,
    Doomed,
    Nursery,
    pull_for_ever,
    push_for_ever,
    reserve_for_ever,
)
from tests.faults.support import Engine, chain
from tests.support import wait_until
from tests.support.node import RunningNode, running_node

pytestmark = pytest.mark.process

DURATION_S = 2.0
HOLD_S = 1.0
LEAVES_NOTHING_S = DURATION_S + HOLD_S + 1.0
VIEW_S = 0.5  # how old what the node says of itself may be
AT_ONCE = 5
PUSH_S = 0.02  # about what pushing or pulling a chain takes


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return Nursery()


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[RunningNode]:
    folder = tmp_path_factory.mktemp("killed")
    with running_node(folder, dram_size_bytes="256MiB", transfer_hold_s=HOLD_S) as running:
        yield running


def nothing_is_left(node: RunningNode, since_s: float) -> bool:
    """As the node saw itself after this moment: what it shows is half a second old."""
    stats = node.stats()
    if stats["at_s"] <= since_s:
        return False
    store = stats["store"]
    dram = store["tiers"]["dram"]
    left = store["leases"] + store["reservations"] + dram["held_pages"] + dram["reserved_pages"]
    return left + dram["leased_pages"] == 0


def kill_all(clients: list[Doomed], rng: random.Random) -> None:
    """Each at a moment of its own within a push or pull."""
    for client in clients:
        client.hears()
        threading.Event().wait(rng.uniform(0, PUSH_S))
        client.kill()


@pytest.mark.parametrize(
    ("work", "ended", "base"),
    [(push_for_ever, "expired_reservations", 1_000_000), (pull_for_ever, "expired_leases", 2_000_000)],
    ids=["push", "pull"],
)
@pytest.mark.parametrize(("kind", "far"), [("mooncake", 0), ("shm", 10_000_000)], ids=["mooncake", "shm"])
def test_what_a_killed_client_held_ends_by_itself(
    work, ended, base, kind, far, node, nursery, rounds
) -> None:
    rng = random.Random(5)
    count = rounds(1, 10)
    lives, hit, slowest_s = 0, 0, 0.0
    with Engine(node.control, MANIFEST) as engine:
        for number in range(count):
            seeds = [far + base + 1_000 * (number * AT_ONCE + n) for n in range(AT_ONCE)]
            if work is pull_for_ever:
                for seed in seeds:
                    assert len(engine.put(chain(engine.namespace, OBJECTS, seed))) == OBJECTS
            before = node.stats()["store"]["totals"][ended]
            with contextlib.ExitStack() as stack:
                clients = [
                    stack.enter_context(
                        nursery.client(partial(work, kind=kind), node.control, seed, DURATION_S)
                    )
                    for seed in seeds
                ]
                kill_all(clients, rng)
                killed_s = time.monotonic()
            wait_until(
                partial(nothing_is_left, node, killed_s),
                LEAVES_NOTHING_S + VIEW_S,
                "all that was held is free",
            )
            slowest_s = max(slowest_s, time.monotonic() - killed_s)
            lives += len(clients)
            hit += min(len(clients), node.stats()["store"]["totals"][ended] - before)
            for client, seed in zip(clients, seeds, strict=True):
                if work is pull_for_ever:
                    assert client.heard[0] == OBJECTS, "a store that always misses"
                    assert engine.get(chain(engine.namespace, OBJECTS, seed)) == OBJECTS
                else:
                    keys = chain(engine.namespace, OBJECTS, client.heard[-1])  # those that were moving
                    assert len(engine.put(keys)) == OBJECTS
                    assert engine.get(keys) == OBJECTS
    print(f"{lives} killed, {hit} held something; all free {slowest_s:.1f} s after that at the latest")
    assert hit >= 0.5 * lives, f"only {hit} of {lives} clients held something when they were killed"


def test_a_pusher_in_a_crash_loop_starves_only_itself(node, nursery, rounds) -> None:
    """Every life is a new client to the node, and reserves all it can get for as long as it may."""
    wait_until(partial(nothing_is_left, node, time.monotonic()), 10)
    pushed, granted = 0, []
    with Engine(node.control, MANIFEST) as engine:
        assert len(engine.put(chain(engine.namespace, OBJECTS, 1))) == OBJECTS
        for life in range(rounds(6, 60)):
            with nursery.client(reserve_for_ever, node.control, 5_000_000 + 10_000 * life, 120.0) as looper:
                granted.append(sum(looper.hears() for _ in range(5)))
                keys = chain(engine.namespace, OBJECTS, 2 + life)
                began_s = time.monotonic()
                assert len(engine.put(keys)) == OBJECTS, f"refused in life {life}; it had {granted}"
                assert time.monotonic() - began_s < 5.0
                assert engine.get(keys) == OBJECTS
                pushed += OBJECTS
                looper.kill()
    assert granted[0] > 0, "it never had anything"
    assert pushed >= 6 * OBJECTS
