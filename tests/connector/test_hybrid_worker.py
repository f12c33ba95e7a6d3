"""The worker half with several kinds of KV: real tensors, a real mover, and one word on a load that failed.

Mutants that must fail here: blocks of such a model reported as invalid, which ends vLLM's engine; a kind's object
moved with the shape of another; a failed request that is not reported as finished, for which vLLM waits for ever.
"""

from dataclasses import replace
from typing import Any

import pytest

from connector.kinds import Kind, kinds_of
from connector.metadata import LoadObject, SaveObject, Shape
from connector.shape import put_together
from kvstore.core import Key, checksums
from tests.connector.hybrids import BLOCK, GEMMA, QWEN, Hybrid, make_hybrid
from tests.connector.rig import Rig
from tests.connector.test_kind_caches import blocks_of, object_of

MODELS = {"gemma": GEMMA, "qwen": QWEN}


class HybridRig(Rig):
    """A worker half of a model of several kinds."""

    engine: Any

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return kinds_of(self.engine.config.kv_cache_groups)

    @property
    def shape(self) -> Shape:
        return put_together({(0, 0): self.engine.understood().handshake}, 2).shape

    def wanted(
        self, kind: int, source: Hybrid, blocks: list[list[int]], targets: list[list[int]]
    ) -> LoadObject:
        """An object of another engine, stored, and where it shall go."""
        data = object_of(source, self.kinds[kind], blocks)
        table = checksums(memoryview(data), self.shape.of(kind).geometry.runs(len(data)))
        flat = tuple(block for some in targets for block in some)
        extents = self.node["one"].put(data)
        return LoadObject(Key(bytes(32)), 0, b"g" * 8, extents, len(data), table, flat, kind=kind)


@pytest.fixture(params=MODELS)
def rig(request: pytest.FixtureRequest) -> HybridRig:
    engine: Any = make_hybrid(MODELS[request.param])
    return HybridRig(engine=engine)


def a_hit(rig: HybridRig, source: Hybrid) -> list[tuple[int, list[list[int]], LoadObject]]:
    """An object of each kind."""
    found = []
    for number, kind in enumerate(rig.kinds):
        count = 2 if kind.tokens_max(64) > 1 else 1
        here, there = blocks_of(kind, count, 20 + number), blocks_of(kind, count, 30 + number)
        found.append((number, there, rig.wanted(number, source, here, there)))
    return found


def test_what_is_saved_of_each_kind_is_what_its_layers_hold(rig) -> None:
    for number, kind in enumerate(rig.kinds):
        count = 2 if kind.tokens_max(64) > 1 else 1
        blocks = blocks_of(kind, count, number)
        truth = object_of(rig.engine, kind, blocks)
        home = rig.node["one"]
        flat = tuple(block for some in blocks for block in some)
        wanted = SaveObject(Key(bytes(32)), b"g" * 8, home.grant(len(truth)), len(truth), flat, kind=number)
        rig.run(replace(rig.save_job([]), objects=(wanted,)))
        assert home.read(wanted.extents, len(truth)) == truth
        [report] = [r for reports in rig.everything().saves.values() for r in reports][number:]
        runs = rig.shape.of(number).geometry.runs(len(truth))
        assert b"".join(report.checksums[0].values()) == checksums(memoryview(truth), runs)


def test_a_load_brings_every_kind_to_its_own_blocks(rig) -> None:
    source = make_hybrid(GEMMA if len(rig.kinds[1].groups) and rig.kinds[1].tokens else QWEN, seed=9)
    hit = a_hit(rig, source)
    for number, _, wanted in hit:
        rig.run(replace(rig.load_job([wanted], f"r{number}"), all_or_nothing=True))
    step = rig.everything()
    assert step.finished == {f"r{number}" for number, _, _ in hit}
    assert not step.failed
    assert not step.invalid
    for number, there, wanted in hit:  # the last was written last: blocks of a kind may be another's, too
        if number == len(hit) - 1:
            data = object_of(rig.engine, rig.kinds[number], there)
            assert checksums(memoryview(data), rig.shape.of(number).geometry.runs(len(data))) == wanted.table


@pytest.mark.parametrize("bad", [0, 1])
def test_a_load_that_fails_in_one_kind_fails_as_a_request(rig, bad) -> None:
    source = make_hybrid(GEMMA if rig.kinds[1].tokens else QWEN, seed=9)
    hit = a_hit(rig, source)
    rig.node["one"].flip(hit[bad][2].extents, 5)
    step = rig.run(replace(rig.load_job([wanted for _, _, wanted in hit]), all_or_nothing=True))
    assert step.failed == step.finished == {"r"}
    assert not step.invalid
    assert rig.load_report().suspect == bad


def test_a_load_that_nothing_is_known_of_fails_as_a_request(rig) -> None:
    job = replace(rig.load_job([], deadline_s=0.0), all_or_nothing=True)
    nothing = LoadObject(Key(bytes(32)), 0, b"", (), 0, b"", (3, 4))
    step = rig.run(replace(job, objects=(nothing,)))
    assert step.failed == step.finished == {"r"}
    assert not step.invalid
    assert BLOCK == 32
