"""A prompt larger than the node's memory comes from its NVMe, after a restart: the same tokens, and told as such."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.engine import Engine
from deploy.demo.node import Node
from tests.e2e.support import ask, prompt_text, transfer_config, wait_for_nothing_held
from tests.support import free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHARACTERS = 8_000  # about 1,800 tokens: 80 MiB of KV
GENERATED_TOKENS = 8
CHUNK_BYTES = 256 * 46_080
LITTLE, PLENTY = "64MiB", "512MiB"


class Stage:
    """Boots of one node, on the same ports and the same device."""

    def __init__(self, logs: Path, exits: contextlib.ExitStack) -> None:
        self.ports = free_port(), free_port()
        self.logs, self.exits = logs, exits
        self.boots = 0

    def start(self, dram: str) -> Node:
        self.boots += 1
        device = ("--nvme-path", str(self.logs / "device"), "--nvme-size-bytes", "512MiB", "--node-id", "n1")
        flags = ("--dram-size-bytes", dram, *device)
        node = Node(*self.ports, self.logs, name=f"node-{self.boots}", flags=flags)
        self.exits.callback(node.stop)
        node.wait_ready()
        return node


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with contextlib.ExitStack() as exits:
        yield Stage(tmp_path, exits)


def stored(node: Node) -> float:
    return node.gauge("kvstore_objects", tier="dram") + node.gauge("kvstore_objects", tier="nvme")


def test_a_restarted_node_with_little_memory_streams_a_prompt(
    stage: Stage, model_path: Path, repository: Path, tmp_path: Path
) -> None:
    prompt = prompt_text(repository, "canal")[:CHARACTERS]
    node = stage.start(PLENTY)
    config = transfer_config(node.control, load_timeout_s=60.0)
    engine = Engine("engine", model_path, free_port(), tmp_path, store=config)
    stage.exits.callback(engine.stop)
    engine.wait_ready()
    first = ask(engine, prompt, GENERATED_TOKENS)
    assert first.answer.pulled == 0
    tokens = first.answer.computed
    wait_until(lambda: stored(node) >= tokens // 256, 60, "the prompt is stored")
    assert tokens // 256 * CHUNK_BYTES > 64 << 20, f"{tokens} tokens are no more than the memory to come"
    assert node.stop() == 0

    node = stage.start(LITTLE)
    assert node.gauge("kvstore_objects", tier="nvme") >= tokens // 256
    engine.forget_local_prefixes()
    second = ask(engine, prompt, GENERATED_TOKENS)
    print(f"first: {first}\nfrom NVMe: {second}")
    assert second.answer.text == first.answer.text
    assert second.answer.pulled >= tokens // 256 * 256
    pulled = second.answer.pulled
    assert f"{pulled} tokens pulled: {pulled} from NVMe" in engine.log_path.read_text()
    assert engine.metric("vllm:kvstore_pulled_tokens_total", tier="disk") == pulled
    wait_for_nothing_held(node, 60)
