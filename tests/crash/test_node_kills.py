"""kill -9 of a whole node on real files, again and again, while an engine pushes and pulls.

What the node had reported as on NVMe (`/v1/objects`) is there after the restart, and its bytes are right. Bytes
go through the node's memory: five hundred Mooncakes, one after the other in one process, run out of ports that are
not those of a node before. CI kills it some twenty times, `SOAK=1` five hundred times.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core import Key
from tests.faults.streaming import StreamingEngine
from tests.faults.support import chain, shape
from tests.support import RedisServer, wait_until
from tests.support.node import RunningNode, running_node

SOAK = os.environ.get("SOAK") == "1"
CYCLES = 500 if SOAK else 20
pytestmark = [pytest.mark.process, pytest.mark.timeout(7_200 if SOAK else 240)]
MODEL = shape(128 << 10)
LENGTH = 24
REMEMBERED = 12  # chains that are pulled and pushed again
SETTLED_S = 2.0
PATIENT = 5  # every so many cycles the load goes on for so long that what it demotes settles
DEVICE_BYTES = (2 << 30) if SOAK else (192 << 20)  # nothing is given up for want of room


class Witness:
    """What the node has said, and when; from outside."""

    def __init__(self) -> None:
        self.reported: set[Key] = set()
        self.left_dram: dict[Key, float] = {}  # when it was first seen to be gone from DRAM
        self.acknowledged: set[Key] = set()

    def killed(self) -> None:
        """What was only in DRAM is no more."""
        self.acknowledged = set(self.reported)
        self.left_dram = {key: self.left_dram.get(key, time.monotonic()) for key in self.reported}

    def look(self, node: RunningNode) -> None:
        """Takes note of every object."""
        tiers = dict(listing(node))
        now_s = time.monotonic()
        self.reported = {key for key, where in tiers.items() if where.get("nvme") == "ready"}
        in_dram = {key for key, where in tiers.items() if "dram" in where}
        for key in self.acknowledged:
            if key in in_dram:
                self.left_dram.pop(key, None)
            else:
                self.left_dram.setdefault(key, now_s)


def listing(node: RunningNode) -> Iterator[tuple[Key, dict[str, str]]]:
    cursor: int | None = 0
    while cursor is not None:
        status, text = node.get(f"/v1/objects?limit=1000&cursor={cursor}")
        assert status == 200, text
        page = json.loads(text)
        yield from ((Key(bytes.fromhex(each["key"])), each["tiers"]) for each in page["objects"])
        cursor = page["cursor"]


def load(
    engine: StreamingEngine, witness: Witness, node: RunningNode, rng: random.Random, first: int
) -> None:
    """Pushes and pulls for a moment; looks at the node meanwhile, and last."""
    settling_s = 0.0 if first % PATIENT else SETTLED_S + 0.5
    end_s = time.monotonic() + settling_s + rng.uniform(0.2, 0.8)
    while time.monotonic() < end_s:
        keys = chain(MODEL.namespace, LENGTH, first + rng.randrange(REMEMBERED))
        for start in range(0, LENGTH, 8):
            witness.acknowledged.update(engine.put(keys[start : start + 8]))
        engine.stream(chain(MODEL.namespace, LENGTH, rng.randrange(first + REMEMBERED)), 2.0)
        witness.look(node)


def settings(folder: Path, redis: RedisServer) -> dict[str, object]:
    return {
        "nvme_path": folder / "device",
        "nvme_size_bytes": DEVICE_BYTES,
        "node_id": "n1",
        "dram_size_bytes": "6MiB",
        "dram_page_bytes": "64KiB",
        "redis_url": redis.url,
    }


def check(node: RunningNode, engine: StreamingEngine, reported: list[Key]) -> None:
    found = {key for key, where in listing(node) if "nvme" in where}
    assert set(reported) <= found, "what was reported is lost"
    for key in reported:
        done = engine.stream([key])
        assert (done.got, done.bad) == (1, 0), f"{key.hex()[:16]} was reported, and cannot be read: {done}"


def kill_again_and_again(tmp_path: Path, cycles: int, rest_s: float) -> None:
    rng = random.Random(9)
    witness = Witness()
    settled = fresh = unreported = 0
    with RedisServer(tmp_path) as redis:
        for cycle in range(cycles):
            with running_node(tmp_path, **settings(tmp_path, redis)) as node:
                with StreamingEngine(node.control, MODEL, kind="shm") as engine:
                    known = sorted(witness.reported)
                    check(node, engine, rng.sample(known, min(20, len(known))))
                    assert witness.reported <= {key for key, _ in listing(node)}, "what was reported is lost"
                    load(engine, witness, node, rng, cycle)
                    demoted = [
                        key
                        for key, since_s in witness.left_dram.items()
                        if since_s < time.monotonic() - SETTLED_S
                    ]
                    node.kill()
                missing = [key for key in demoted if key not in witness.reported]
                settled += len(demoted)
                fresh += len(set(demoted).difference(known))
                unreported += len(missing)
                assert len(missing) <= 0.05 * len(demoted), (
                    f"{len(missing)} of {len(demoted)} were not reported"
                )
            if cycle % 50 == 49:
                print(
                    f"{cycle + 1} kills: {settled} settled, {fresh} fresh, {unreported} not reported",
                    flush=True,
                )
            witness.killed()
            woken_s = time.monotonic() + rest_s
            wait_until(lambda at=woken_s: time.monotonic() >= at, deadline_s=rest_s + 5)  # type: ignore[misc]
        with running_node(tmp_path, **settings(tmp_path, redis)) as node:
            assert node.get("/readyz")[0] == 200
            with StreamingEngine(node.control, MODEL, kind="shm") as engine:
                check(node, engine, sorted(witness.reported))
    print(
        f"{cycles} kills, each {rest_s:g} s before the restart: {settled} times an object had left DRAM more "
        f"than {SETTLED_S:g} s before, {fresh} times since the last start; {unreported} times it was not reported; "
        f"all {len(witness.reported)} reported last were read and right"
    )
    assert settled > 10 * cycles and fresh > cycles, "hardly anything was demoted: nothing was shown"
    assert len(witness.reported) > 100


def test_what_a_node_reported_is_there_after_every_kill(tmp_path) -> None:
    """Mutants: the tier is said to be nvme when the spill begins; a restart forgets what it found."""
    kill_again_and_again(tmp_path, CYCLES, 0.0)


@pytest.mark.slow
def test_the_same_after_a_rest(tmp_path) -> None:
    kill_again_and_again(tmp_path, 3, 30.0)
