"""As a child of vLLM's MultiConnector, beside another store: whoever is not chosen gives its lease back."""

from typing import Any
from unittest.mock import patch

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

import connector
from connector.scheduler import SchedulerHalf
from tests.connector.support import BLOCK, CHUNK, Engine, FakeControl, Node, Worker, prompt

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)
STORED = 3 * CHUNK + 2 * BLOCK


class Workers(Worker):
    """The workers of two children on one KV memory."""

    def __init__(self, nodes: list[Node], num_blocks: int) -> None:
        super().__init__(nodes[0], num_blocks)
        self.children = [Worker(node, num_blocks) for node in nodes]
        for child in self.children:
            child.memory = self.memory

    def step(self, jobs: Any) -> KVConnectorOutput:
        outputs = [child.step(one) for child, one in zip(self.children, jobs.metadata, strict=True)]
        metadata = tuple(output.kv_connector_worker_meta for output in outputs)
        return KVConnectorOutput(
            finished_sending=set(),
            finished_recving=set().union(*(output.finished_recving or () for output in outputs)),
            invalid_block_ids=set().union(*(output.invalid_block_ids for output in outputs)),
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(metadata) if any(metadata) else None,
        )


class MultiEngine(Engine):
    """An engine with two children of our class, each with a node of its own."""

    def __init__(self, nodes: list[Node]) -> None:
        connector.register()
        self.nodes = nodes
        self.halves: list[SchedulerHalf] = []
        super().__init__(nodes[0])
        self.worker = Workers(nodes, 200)

    def _config(self, *arguments: Any) -> VllmConfig:
        config = super()._config(*arguments)
        settings = config.kv_transfer_config.kv_connector_extra_config
        children = [
            {
                "kv_connector": "KVStoreConnector",
                "kv_role": role,
                "kv_connector_extra_config": settings,
            }
            for role in ("kv_both", "kv_consumer")
        ]
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": children},
        )
        return config

    def _first_half(self) -> SchedulerHalf:
        return self.halves[0]

    def _scheduler(self, ahead: bool) -> Scheduler:
        controls = iter([FakeControl(node) for node in self.nodes])

        def start(vllm_config: Any, cache_config: Any, config: Any, breaker: Any) -> SchedulerHalf:
            self.halves.append(
                SchedulerHalf(vllm_config, cache_config, config, next(controls), breaker, lambda: self.now)
            )
            return self.halves[-1]

        with patch("connector.start.start_scheduler_half", start):
            return self._make_scheduler(ahead)


@pytest.fixture
def nodes() -> list[Node]:
    return [Node(1), Node(2)]


def test_whoever_is_not_chosen_gives_its_lease_back(nodes) -> None:
    answers = [Engine(node).generate("a", TEXT) for node in nodes]
    engine = MultiEngine(nodes)
    assert [engine.generate("b", TEXT)] * 2 == answers
    assert [half.shared.stats.pulled_tokens for half in engine.halves] == [STORED, 0]
    assert "acquire" in nodes[1].calls, "the second child was not asked: the test shows nothing"
    for node in nodes:
        assert node.is_quiet
    engine.assert_nothing_left()


def test_the_second_child_loads_what_the_first_does_not_have(nodes) -> None:
    answer = Engine(nodes[1]).generate("a", TEXT)
    engine = MultiEngine(nodes)
    assert engine.generate("b", TEXT) == answer
    assert [half.shared.stats.pulled_tokens for half in engine.halves] == [0, STORED]
    assert len(nodes[0].objects) == 4, "the first child saves what the second has loaded"
    engine.assert_nothing_left()
