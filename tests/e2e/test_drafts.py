"""Speculative decoding with the store: the same tokens, and drafts as good behind a load as behind a prefill.

The drafts of the first engine are made by a copy of its own model, so nearly every one is accepted as long as the
draft layers' KV is what it should be. An EAGLE head of random weights is never right: of it only the path is tested.
Drafts from n-grams have no KV, so engines with and without them share.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deploy.demo.engine import Engine
from deploy.demo.node import Node
from tests.e2e.fleet import FORGETFUL, Prompts
from tests.e2e.support import Asked, ask, complete_ids, transfer_config, wait_for_nothing_held
from tests.support import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DRAFTS = 3
PROMPT_TOKENS, CHUNK_TOKENS, GENERATED_TOKENS = 700, 256, 80
WHOLE = PROMPT_TOKENS // 128 * 128  # vLLM's block size on CPU

Start = Callable[..., Engine]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(free_port(), free_port(), tmp_path)
    try:
        node.wait_ready()
        yield node
    finally:
        node.stop()


@pytest.fixture
def start(node: Node, model_path: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts an engine of the model with these drafts; the one before it ends."""
    with contextlib.ExitStack() as exits:

        def begin(name: str, **drafts: Any) -> Engine:
            exits.pop_all().close()
            flags = [*FORGETFUL]
            if drafts:
                drafts["num_speculative_tokens"] = DRAFTS
                flags += ["--speculative-config", json.dumps(drafts)]
            config = transfer_config(node.control, write_back=True)
            engine = Engine(name, model_path, free_port(), tmp_path, store=config, flags=flags)
            exits.callback(engine.stop)
            engine.wait_ready()
            return engine

        yield begin


@pytest.fixture
def prompts(model_path: Path, repository: Path) -> Prompts:
    return Prompts(model_path, repository)


def eagle_head(model: Path, folder: Path) -> Path:
    """One layer of random weights that fits the model, as a checkpoint of EAGLE."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = hidden // heads * kv_heads
    shapes = {
        "embed_tokens": (vocabulary, hidden),
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (hidden, hidden),
        "layers.0.self_attn.k_proj": (width, hidden),
        "layers.0.self_attn.v_proj": (width, hidden),
        "layers.0.self_attn.o_proj": (hidden, hidden),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
        "layers.0.post_attention_layernorm": (hidden,),
    }
    random = torch.Generator().manual_seed(1)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=random) * 0.02 for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


def accepted(engine: Engine) -> tuple[int, int]:
    """Drafts so far, and how many of them were accepted."""
    names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    drafts, right = (int(engine.metric(name)) for name in names)
    return drafts, right


def ask_twice(engine: Engine, prompt: list[int]) -> tuple[Asked, Asked, list[float]]:
    """The same prompt, computed and then pulled; which share of the drafts was accepted in both."""
    marks, asked = [accepted(engine)], []
    for _ in range(2):
        asked.append(ask(engine, prompt, GENERATED_TOKENS))
        marks.append(accepted(engine))
    shares = [(b[1] - a[1]) / max(1, b[0] - a[0]) for a, b in itertools.pairwise(marks)]
    print(f"computed: {asked[0]}; again: {asked[1]}; accepted {shares}")
    return asked[0], asked[1], shares


def test_drafts_are_as_good_behind_a_load(
    start: Start, node: Node, prompts: Prompts, model_path: Path, tmp_path: Path
) -> None:
    prompt = prompts.cut(PROMPT_TOKENS)
    engine = start("copy", method="draft_model", model=str(model_path))
    cold, warm, shares = ask_twice(engine, prompt)
    assert (cold.answer.pulled, warm.answer.pulled) == (0, WHOLE)
    assert warm.answer.text == cold.answer.text
    assert min(shares) > 0.9, "with the KV that belongs to them, copies agree"
    wait_for_nothing_held(node, 60)

    engine = start("eagle", method="eagle", model=str(eagle_head(model_path, tmp_path / "head")))
    first, again, _ = ask_twice(engine, prompt)
    assert (first.answer.pulled, again.answer.pulled) == (0, WHOLE), (
        "with other drafts it is another namespace"
    )
    assert first.answer.text == again.answer.text == cold.answer.text
    assert accepted(engine)[0] > 0
    wait_for_nothing_held(node, 60)

    engine = start("n-grams", method="ngram", prompt_lookup_max=3, prompt_lookup_min=1)
    first, again, _ = ask_twice(engine, prompt)
    assert (first.answer.pulled, again.answer.pulled) == (0, WHOLE)
    assert first.answer.text == again.answer.text == cold.answer.text
    assert accepted(engine)[0] > 0
    said = complete_ids(engine, prompt, GENERATED_TOKENS)
    wait_for_nothing_held(node, 60)

    engine = start("none")
    last = ask(engine, prompt, GENERATED_TOKENS)
    assert (last.answer.pulled, last.answer.text) == (WHOLE, cold.answer.text), "n-grams have no KV"
    turn = ask(engine, [*said.prompt, *said.answer, *prompts.cut(10)], 1)
    final = PROMPT_TOKENS + GENERATED_TOKENS - 1
    assert turn.answer.pulled == final // CHUNK_TOKENS * CHUNK_TOKENS, (
        "and answers are saved as without drafts"
    )
    wait_for_nothing_held(node, 60)
