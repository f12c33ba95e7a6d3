"""Saves gathered layer by layer, with real tensors and a real mover; on CPU a layer is there when it is asked for.

Mutants that must fail here: what was gathered early is not used; it is used although a layer is missing, or its step
was not closed; the first of two calls of a layer counts; a buffer is used for another offer while somebody copies
into it; blocks that are touched while the engine sleeps.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import pytest
from vllm.v1.outputs import KVConnectorOutput

from connector.connector import KVStoreConnector
from connector.early import EarlyObjects
from connector.layerwise import LayerwiseHalf
from connector.metadata import Coming, Jobs, SaveJob
from tests.connector.rig import Rig
from tests.connector.support import CHUNK, Engine, Node, prompt


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """The workers of a test end with it."""
    yield
    while Rig.alive:
        Rig.alive.pop().worker.shutdown()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each object that was saved came from what was gathered early."""
    told: list[bool] = []
    take = EarlyObjects.take

    def noted(early: EarlyObjects, offer: int, out: memoryview) -> bool:
        told.append(take(early, offer, out))
        return told[-1]

    monkeypatch.setattr(EarlyObjects, "take", noted)
    return told


class Layered(Rig):
    """An engine whose steps call the hook of every layer."""

    def __init__(self) -> None:
        super().__init__(half=LayerwiseHalf)

    def compute(self, coming: Sequence[Coming], layers: Sequence[str] | None = None) -> None:
        """A step that completes these."""
        self.step(coming=coming, forward=self.layers_of(layers))
        self.settle()

    def settle(self) -> None:
        """Nothing is being gathered any more."""
        early = self.early
        with early._changed:
            assert early._changed.wait_for(lambda: not (early._work or early._copying), 10)

    @property
    def early(self) -> EarlyObjects:
        assert isinstance(self.worker, LayerwiseHalf) and self.worker._early is not None
        return self.worker._early

    def layers_of(self, layers: Sequence[str] | None = None) -> Callable[[], None]:
        def forward() -> None:
            assert isinstance(self.worker, LayerwiseHalf)
            for name in self.engine.tensors if layers is None else layers:
                self.worker.save_layer(name)

        return forward

    def save(self, coming: Coming) -> bytes:
        """What a node is given for an offer, in pages that it has free again."""
        self.node["one"]._low, self.node["one"]._high = count(0, 2), count(255, -2)
        job = self.save_job([coming.blocks])
        job = replace(job, objects=(replace(job.objects[0], offer=coming.offer),))
        [report] = self.run(job).saves[job.job]
        assert report.checksums[0] is not None
        return self.written(job)

    def written(self, job: SaveJob) -> bytes:
        return self.node["one"].read(job.objects[0].extents, job.objects[0].size_bytes)


ONE = Coming(7, (5, 9))


def test_what_is_saved_was_gathered_in_its_step(taken: list[bool]) -> None:
    rig = Layered()
    computed = rig.engine.bytes_of(ONE.blocks)
    rig.compute([ONE])
    rig.engine.fill(2)
    assert rig.save(ONE) == computed != rig.engine.bytes_of(ONE.blocks)
    assert rig.save(ONE) == rig.engine.bytes_of(ONE.blocks), "an offer is taken once"
    assert taken == [True, False]


@pytest.mark.parametrize("layers", [[], ["model.layers.1.attn"], ["model.layers.0.attn", "draft.0"]])
def test_what_is_not_whole_is_gathered_from_its_blocks(taken: list[bool], layers: list[str]) -> None:
    rig = Layered()
    rig.compute([ONE], layers)
    rig.engine.fill(2)
    assert rig.save(ONE) == rig.engine.bytes_of(ONE.blocks)
    assert taken == [False]


def test_a_step_that_was_not_closed_counts_for_nothing(taken: list[bool]) -> None:
    """As when a pass fails in the middle; another step follows."""

    def fail() -> None:
        rig.layers_of()()
        raise ZeroDivisionError

    rig = Layered()
    with pytest.raises(ZeroDivisionError):
        rig.step(coming=[ONE], forward=fail)
    rig.step()
    rig.engine.fill(2)
    assert rig.save(ONE) == rig.engine.bytes_of(ONE.blocks)
    assert taken == [False]


def test_the_last_call_of_a_layer_counts(taken: list[bool]) -> None:
    """A step in two halves calls for each."""

    def forward() -> None:
        rig.layers_of()()
        rig.engine.fill(3)
        rig.layers_of()()

    rig = Layered()
    rig.step(coming=[ONE], forward=forward)
    rig.settle()
    computed = rig.engine.bytes_of(ONE.blocks)
    rig.engine.fill(4)
    assert rig.save(ONE) == computed
    assert taken == [True]


def test_nothing_is_mixed_up_when_memory_is_used_again(taken: list[bool]) -> None:
    """Offers of many sizes, more than there is memory for; some are saved, in any order, some never."""
    rig, rng = Layered(), random.Random(1)
    computed: dict[Coming, bytes] = {}
    numbers = iter(range(1, 1_000))
    for step in range(15):
        coming = [
            Coming(next(numbers), tuple(rng.sample(range(1, 64), rng.randint(1, 20)))) for _ in range(3)
        ]
        rig.engine.fill(step)
        rig.compute(coming)
        computed |= {one: rig.engine.bytes_of(one.blocks) for one in coming}
        rig.engine.fill(1_000 + step)
        for one in rng.sample(list(computed), 2):
            seen = len(taken)
            saved = rig.save(one)
            assert saved == (computed.pop(one) if taken[seen] else rig.engine.bytes_of(one.blocks))
    assert taken.count(True) > 3 and taken.count(False) > 3


def test_an_engine_that_sleeps_is_not_touched_and_goes_on_later(taken: list[bool]) -> None:
    rig = Layered()
    rig.compute([ONE])
    rig.worker.leave_blocks()
    assert not (rig.early._early or rig.early._work or rig.early._copying)
    rig.compute([ONE])
    rig.worker.return_to_blocks()
    computed = rig.engine.bytes_of(ONE.blocks)
    assert rig.save(ONE) == computed
    rig.compute([replace(ONE, offer=8)])
    rig.engine.fill(2)
    assert rig.save(replace(ONE, offer=8)) == computed
    assert taken == [False, True]


def test_vllm_is_told_that_hooks_of_layers_are_needed() -> None:
    assert KVStoreConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not KVStoreConnector.requires_piecewise_for_cudagraph({"layerwise": False})


@pytest.mark.parametrize("layerwise", [False, True])
def test_workers_are_told_what_a_step_completes_only_where_they_gather_it_then(layerwise: bool) -> None:
    engine = Engine(Node(), layerwise=layerwise)
    engine.submit("r", prompt(1, 2 * CHUNK))
    step, coming = engine.worker.step, list[Coming]()

    def noted(jobs: Jobs) -> KVConnectorOutput:
        coming.extend(jobs.coming)
        return step(jobs)

    engine.worker.step = noted  # type: ignore[method-assign]
    engine.run()
    saved = [wanted for job in engine.worker.seen_saves for wanted in job.objects]
    assert len(saved) == 2
    told = [Coming(wanted.offer, wanted.blocks) for wanted in saved]
    assert coming == (told if layerwise else [])
    assert len({one.offer for one in told}) == (2 if layerwise else 1)
    engine.assert_nothing_left()
