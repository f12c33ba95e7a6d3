"""What may be part of an engine's life, and is no reason not to share: each on vLLM's real scheduler.

The fake model's KV depends on images, salt, embeddings and adapter (`kv_of`): sharing too much is a wrong token.
More of the life: preemption, resets, aborts (test_scheduler_saves.py, test_scheduler_loads.py), adapters
(test_lifecycle.py), drafts (test_write_back.py), two stores in one engine (test_multi.py), and all of it in any order
(test_machine.py).
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata as Multi,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import KVConnectorOutput

import connector
from connector.metadata import Jobs
from connector.scheduler import SchedulerHalf
from tests.connector.support import BLOCK, CHUNK, Engine, Node, Worker, prompt

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)
STORED = 3 * CHUNK + 2 * BLOCK


@pytest.fixture
def node() -> Node:
    return Node()


def pulled(engine: Engine) -> int:
    return int(engine.half.shared.stats.pulled_tokens)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", range(10))
def test_aborted_at_any_stage(node, steps, ahead) -> None:
    """Half of its prompt is stored and loads for a while, then it is computed in pieces, saved and answered."""
    Engine(node).generate("a", TEXT[: 2 * CHUNK])
    answer = Engine(Node()).generate("a", TEXT)
    engine = Engine(node, max_batched=48, ahead=ahead)
    engine.submit("b", TEXT, max_tokens=3)
    for step in range(steps):
        engine.worker.hold_loads, engine.worker.hold_saves = step < 4, step < 8
        engine.step()
    engine.abort("b")
    engine.worker.hold_loads = engine.worker.hold_saves = False
    engine.run()
    engine.assert_nothing_left()
    assert engine.generate("c", TEXT) == answer
    assert pulled(engine) >= 2 * CHUNK, "it was loaded before or after"
    engine.assert_nothing_left()


@pytest.mark.parametrize("caching", [True, False])
def test_several_answers_to_one_prompt(node, caching) -> None:
    """n = 4: to the scheduler they are requests of their own, named as vLLM's frontend names them."""
    answer = Engine(node).generate("a", TEXT)
    engine = Engine(node, prefix_caching=caching)
    parent = ParentRequest(SimpleNamespace(request_id="b", external_req_id="b", params=SamplingParams(n=4)))
    names = [parent.get_child_info(index)[0] for index in range(parent.n)]
    for name in names:
        engine.submit(name, TEXT)
    engine.run()
    assert [engine.tokens[name] for name in names] == [answer] * 4
    assert pulled(engine) == 4 * STORED, "all were promised before any of them was there"
    engine.assert_nothing_left()


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


class Seeing(Engine):
    """An engine with an encoder, as far as its scheduler cares."""

    def _make_scheduler(self, ahead: bool) -> Scheduler:
        scheduler = super()._make_scheduler(ahead)
        scheduler.max_num_encoder_input_tokens = 4 * CHUNK
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4 * CHUNK)
        return scheduler


def test_an_image_is_shared_with_the_same_image_only(node) -> None:
    """The prompts are equal token by token, as placeholders are."""
    cat, dog = [image("cat", CHUNK + 9, 30)], [image("dog", CHUNK + 9, 30)]
    answers = [Seeing(node).generate("a", TEXT, mm_features=one) for one in (cat, dog)]
    assert answers[0] != answers[1]
    engine = Seeing(node)
    assert engine.generate("b", TEXT, mm_features=cat) == answers[0]
    assert pulled(engine) == STORED
    other = Seeing(node)
    assert other.generate("c", TEXT, mm_features=[image("owl", CHUNK + 9, 30)]) not in answers
    assert pulled(other) == CHUNK, "what lies before the image does not depend on it"
    other.assert_nothing_left()


@pytest.mark.parametrize("aside", [{"cache_salt": "pepper"}, {"cache_salt": None}])
def test_a_salt_is_shared_with_the_same_salt_only(node, aside) -> None:
    answer = Engine(node).generate("a", TEXT, cache_salt="salt")
    engine = Engine(node)
    assert engine.generate("b", TEXT, **aside) != answer
    assert pulled(engine) == 0
    assert engine.generate("c", TEXT, cache_salt="salt") == answer
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


def test_embeddings_are_shared_with_the_same_embeddings_only(node) -> None:
    embeds = torch.arange(4.0 * len(TEXT)).reshape(len(TEXT), 4)
    nothing = [0] * len(TEXT)
    answer = Engine(node).generate("a", nothing, prompt_embeds=embeds)
    changed = embeds.clone()
    changed[2 * CHUNK, 3] += 1.0
    engine = Engine(node)
    assert engine.generate("b", nothing, prompt_embeds=changed) != answer
    assert pulled(engine) == 2 * CHUNK
    assert engine.generate("c", nothing, prompt_embeds=embeds.clone()) == answer
    engine.assert_nothing_left()
    assert pulled(engine) >= STORED


class Replica(Engine):
    """One of the replicas of a data-parallel engine: vLLM gives each its own scheduler and engine id."""

    def __init__(self, node: Node, rank: int) -> None:
        self._rank = rank
        super().__init__(node)

    def _config(self, *arguments: Any) -> VllmConfig:
        config = super()._config(*arguments)
        config.parallel_config.data_parallel_size = 2
        config.parallel_config.data_parallel_rank = self._rank
        config.kv_transfer_config.engine_id = f"engine_dp{self._rank}"
        return config


def test_replicas_share_with_each_other_and_with_a_single_engine(node) -> None:
    answer = Replica(node, 0).generate("a", TEXT)
    for engine in (Replica(node, 1), Engine(node)):
        assert engine.generate("b", TEXT) == answer
        assert pulled(engine) == STORED
        engine.assert_nothing_left()


class Beside(Engine):
    """An engine with another connector beside ours: vLLM's own example, which keeps KV in files."""

    def __init__(self, node: Node, folder: Path, *, first: bool) -> None:
        connector.register()
        self._folder, self._first = folder, first
        super().__init__(node)

    def _config(self, *arguments: Any) -> VllmConfig:
        config = super()._config(*arguments)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True  # as the example wants it
        ours = {
            "kv_connector": "KVStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.kv_transfer_config.kv_connector_extra_config,
        }
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._folder)},
        }
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": [ours, other] if self._first else [other, ours]},
        )
        return config

    def _first_half(self) -> SchedulerHalf:
        mine = 0 if self._first else 1
        self.worker = BesideWorker(self.worker, mine)
        half: SchedulerHalf = self.connector._connectors[mine]._scheduler
        return half


class BesideWorker(Worker):
    """The fake worker half, for which one of several kinds of jobs is."""

    def __init__(self, worker: Worker, mine: int) -> None:
        super().__init__(worker.node, len(worker.memory))
        self._mine = mine

    def step(self, jobs: Any) -> KVConnectorOutput:
        own = jobs.metadata[self._mine]
        assert isinstance(own, Jobs)
        output = super().step(own)
        if (reports := output.kv_connector_worker_meta) is not None:
            both = [None, None]
            both[self._mine] = reports
            output.kv_connector_worker_meta = Multi(tuple(both))
        return output


@pytest.mark.parametrize("first", [True, False])
def test_another_connector_on_either_side(node, tmp_path, first) -> None:
    answer = Engine(node).generate("a", TEXT)
    engine = Beside(node, tmp_path, first=first)
    assert engine.generate("b", TEXT) == answer
    assert pulled(engine) == STORED
    other = prompt(2, 2 * CHUNK)
    engine.generate("c", other)
    engine.assert_nothing_left()
    reader = Engine(node)
    reader.generate("d", other)
    assert pulled(reader) == 2 * CHUNK, "it saves as well"
