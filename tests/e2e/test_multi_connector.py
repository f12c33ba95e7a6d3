"""Beside vLLM's own example connector, on either side of it: the engine serves, and its statistics do not crash.

The frontend rebuilds every connector's statistics by the connector's name; one that it cannot find ends the engine's
output. So the engine is made to log them every second, and must be seen to have done so.
"""

import json
from pathlib import Path

import pytest

from deploy.demo.engine import Engine
from deploy.demo.node import Node
from tests.e2e.fleet import Prompts
from tests.e2e.support import stored, transfer_config
from tests.support import free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GENERATED_TOKENS = 16
LENGTH, WHOLE_BLOCKS, OBJECTS = 639, 512, 2


@pytest.mark.parametrize("first", [True, False], ids=["before it", "behind it"])
def test_beside_the_example_connector(
    first: bool, model_path: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "1")
    node = Node(free_port(), free_port(), tmp_path)
    try:
        node.wait_ready()
        ours = json.loads(transfer_config(node.control))
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, example] if first else [example, ours]},
        }
        engine = Engine("multi", model_path, free_port(), tmp_path, store=json.dumps(both))
        try:
            engine.wait_ready()
            serve(engine, node, Prompts(model_path, repository), first)
        finally:
            engine.stop()
    finally:
        node.stop()


def serve(engine: Engine, node: Node, prompts: Prompts, first: bool) -> None:
    """Computed, then pulled by whoever is asked first, and the same tokens."""
    prompt = prompts.cut(LENGTH)
    computed = engine.ask(prompt, GENERATED_TOKENS)
    assert (computed.computed, computed.pulled) == (LENGTH, 0)
    wait_until(lambda: stored(node) == OBJECTS, 30, "a push")
    for _ in range(3):
        engine.forget_local_prefixes()
        pulled = engine.ask(prompt, GENERATED_TOKENS)
        assert pulled.text == computed.text
        assert pulled.pulled >= WHOLE_BLOCKS
    if first:
        assert node.gauge("kvstore_tokens_total", outcome="pulled") == 3 * WHOLE_BLOCKS
    stats = engine.log_path.read_text().count("Avg prompt throughput")
    engine.ask(prompts.cut(200), 4)
    wait_until(
        lambda: engine.log_path.read_text().count("Avg prompt throughput") > stats, 15, "more statistics"
    )
    assert engine.metric("vllm:external_prefix_cache_hits_total") > 0
    log = engine.log_path.read_text()
    assert "Traceback" not in log
    assert "internal error" not in log
