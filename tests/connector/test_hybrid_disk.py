"""Models of several kinds whose objects are in part on NVMe: after a restart, or because one kind was spilled.

Mutants that must fail here: pieces that are taken for resident because their chunk is; a hit in part where one of the
objects does not come.
"""

import pytest

from kvstore.core import Key, MissReason
from tests.connector.hybrid_engine import MODELS, HybridEngine
from tests.connector.support import BLOCK, CHUNK, Node, prompt

LENGTH = 5 * CHUNK + 2 * BLOCK + 5
TAIL = LENGTH - 5
ALL = -1


@pytest.fixture
def node() -> Node:
    return Node()


def pushed(node: Node, model: str) -> dict[int, list[Key]]:
    """The keys that a hit of the prompt needs, by kind."""
    HybridEngine(node, MODELS[model]).generate("a", prompt(1, LENGTH))
    probe = HybridEngine(node, MODELS[model])
    probe.generate("p", prompt(1, LENGTH))
    [job] = probe.worker.seen_loads
    found: dict[int, list[Key]] = {kind: [] for kind in range(len(probe.kinds))}
    for wanted in job.objects:
        found[wanted.kind].append(wanted.key)
    return found


@pytest.mark.parametrize("room", [1, 1_000])
@pytest.mark.parametrize("model", MODELS)
def test_any_kind_comes_from_nvme(node, model, room) -> None:
    """Also through a memory that holds one object at a time."""
    keys = pushed(node, model)
    node.room = room
    for kind in (ALL, *keys):
        node.on_disk = set(node.objects) if kind == ALL else set(keys[kind])
        reader = HybridEngine(node, MODELS[model], save=False)
        reader.generate("b", prompt(1, LENGTH))
        stats = reader.half.shared.stats
        assert (stats.pulled_tokens, stats.loads_failed) == (TAIL, 0), f"kind {kind} on NVMe"
        [job] = reader.worker.seen_loads
        assert sum(not wanted.placed for wanted in job.objects) == sum(
            wanted.key in node.on_disk for wanted in job.objects
        )
        assert any(not wanted.placed for wanted in job.objects)
        assert not node.in_dram, "what was read is still leased"
        reader.assert_nothing_left()


@pytest.mark.parametrize("model", MODELS)
def test_a_piece_that_does_not_come_costs_the_hit_and_nothing_else(node, model) -> None:
    keys = pushed(node, model)
    for kind, of_kind in keys.items():
        node.on_disk = set(of_kind)
        node.disk_faults = {of_kind[-1]: MissReason.DEVICE_DOWN}
        reader = HybridEngine(node, MODELS[model], save=False)
        reader.generate("b", prompt(1, LENGTH))
        stats = reader.half.shared.stats
        assert (stats.pulled_tokens, stats.loads_failed) == (0, 1), f"kind {kind}"
        assert stats.misses[MissReason.DEVICE_DOWN] == 1
        reader.assert_nothing_left()
