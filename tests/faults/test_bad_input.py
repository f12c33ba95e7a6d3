"""Whatever is sent to the control port, other clients go on, and memory does not grow.

Mutants that must fail here: a frame that ends the loop; a budget of a whole second per wake-up; replies that pile up
for somebody who takes none.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median

import psutil
import pytest

from tests.faults.attacks import attack
from tests.faults.clients import MANIFEST, OBJECTS, Nursery
from tests.faults.support import Engine, chain
from tests.support.node import RunningNode, running_node

pytestmark = pytest.mark.process

LATENCY_MAX = 2.0
MEMORY_MAX = 50 << 20
ASKED = 400


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("input"), dram_size_bytes="64MiB") as running:
        yield running


def latency_s(ask: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    ask()
    return time.perf_counter() - began_s


def test_bad_frames_cost_others_neither_time_nor_memory(node, rounds) -> None:
    count = rounds(60_000, 100_000)  # seconds: long enough to be looked at on a busy machine
    process = psutil.Process(node.pid)
    with Engine(node.control, MANIFEST) as engine, Nursery().client(attack, node.control, 1, count) as bad:
        keys = chain(engine.namespace, OBJECTS, 1)
        assert engine.put(keys) == keys

        def ask() -> None:
            promise = engine.acquire(keys)
            assert len(promise) == OBJECTS
            engine.release(promise)

        for _ in range(50):
            ask()
        quiet = [latency_s(ask) for _ in range(ASKED)]
        memory = process.memory_info().rss
        assert bad.hears() == 0
        troubled, peak = [], memory
        while not bad.says.poll(0):
            troubled.append(latency_s(ask))
            peak = max(peak, process.memory_info().rss)
        assert bad.hears() == count
        assert troubled, "the attack was over before anything was measured beside it"
        assert engine.get(keys) == OBJECTS
        server = node.stats()["server"]
        seen = server["garbage_frames"] + sum(server["failures"].values())
        print(
            f"latency {1e6 * median(quiet):.0f} us quiet, {1e6 * median(troubled):.0f} us in trouble "
            f"({len(troubled)} requests, worst {1e3 * max(troubled):.0f} ms); "
            f"memory +{(peak - memory) >> 20} MiB at most; {server}"
        )
        assert seen > count / 4, "the bad frames did not arrive"
        assert median(troubled) <= LATENCY_MAX * median(quiet)
        assert peak - memory <= MEMORY_MAX
