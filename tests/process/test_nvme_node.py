"""A node with an NVMe tier, as engines see it: more than DRAM holds, and what is still there after a restart."""

from typing import Any

import pytest

from kvstore.core import Key
from tests.faults.streaming import StreamingEngine
from tests.faults.support import chain, shape
from tests.support import wait_until
from tests.support.node import RunningNode, running_node

pytestmark = pytest.mark.process

MODEL = shape(256 << 10)
KEYS = chain(MODEL.namespace, 256, 1)  # 64 MiB: four times the arena


def push_all(engine: StreamingEngine, keys: list[Key]) -> None:
    """A slow push: what is refused is offered again."""

    def pushed() -> bool:
        first = next((at for at, key in enumerate(keys) if key not in stored), len(keys))
        stored.update(engine.put(keys[first : first + 8]))
        return len(stored) == len(keys)

    stored: set[Key] = set()
    wait_until(pushed, deadline_s=60.0, what="the push")


def settings(folder, **more: object) -> dict[str, object]:
    return {
        "nvme_path": folder / "device",
        "nvme_size_bytes": "256MiB",
        "node_id": "n1",
        "dram_size_bytes": "16MiB",
        "dram_page_bytes": "64KiB",
        **more,
    }


def totals(node: RunningNode) -> dict[str, Any]:
    return node.stats()["store"]["totals"]


def test_a_prompt_of_four_times_the_arena_is_pushed_and_streams_back_and_survives_a_restart(tmp_path) -> None:
    with running_node(tmp_path, **settings(tmp_path)) as node, StreamingEngine(node.control, MODEL) as engine:
        push_all(engine, KEYS)
        wait_until(lambda: totals(node)["committed"] == len(KEYS))
        assert totals(node)["evicted"] == 0
        done = engine.stream(KEYS[:200])
        assert done.got == 200, done
        assert done.from_nvme > 100
        assert node.stop() == 0
    with running_node(tmp_path, **settings(tmp_path)) as node, StreamingEngine(node.control, MODEL) as engine:
        assert f"{len(KEYS)} objects found on it" in node.banner
        done = engine.stream(KEYS)
        assert (done.got, done.from_nvme, done.bad) == (len(KEYS), len(KEYS), 0), done
