"""Speculative decoding whose drafts have KV of their own: layers like others, in the same blocks and objects.

vLLM's real scheduler with an EAGLE drafter (it gives up the last block of local hits, and reserves room for drafts).
The fake model's KV has two halves: the model's, which depends on the tokens up to a position, and the drafter's,
which also depends on the one behind it, and is written for drafts as well. Real drafters: tests/e2e/test_drafts.py.

Mutants that were tried and are caught: the token sampled last counts as final; the drafter's method, or its weights,
are not in the manifest.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import SpeculativeConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from connector import kind_caches
from connector.compat import ModelFacts, model_facts, unsupported_engine
from connector.handoff import describe_format
from connector.identity import build_manifest, weights_identity
from connector.metadata import Handshake, Layer, Shape
from connector.shape import LayoutUnsupported, Whole, in_order, put_together
from kvstore.core import Geometry, LaneGroup
from tests.conftest import MODEL
from tests.connector.caches import full_spec, make_engine, vllm_config
from tests.connector.support import BLOCK, CHUNK, Engine, Node, kv_cache_config, kv_of, prompt
from tests.connector.test_write_back import ANSWER, MORE, Drafting

UNKNOWN = b"?" * 32


def settings(config: Any, folder: Path, **more: Any) -> SpeculativeConfig:
    """vLLM's own, for an EAGLE head of one layer. (Made as a draft model of one: vLLM inspects classes of heads in a
    process of its own, for long.)"""
    folder.mkdir(exist_ok=True)
    head = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(head))
    drafts = SpeculativeConfig(
        **{"method": "draft_model", "model": str(folder), "num_speculative_tokens": Drafting.DRAFTS, **more},
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    drafts.method = "eagle"
    return drafts


class Eagle(Drafting):
    """An engine with a drafter that looks at hidden states. `foreign`: ends of prefixes whose last slot holds drafter
    KV of another continuation."""

    folder: Path

    def __init__(self, node: Node, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.foreign: set[int] = set()
        super().__init__(node, **more)

    def _config(self, *args: Any) -> Any:
        config = Engine._config(self, *args)
        config.speculative_config = settings(config, self.folder)
        return config

    def _attend(self, name: str, start: int, stop: int, inputs: Sequence[int]) -> None:
        values = kv_of(self.scheduler.requests[name], inputs)
        for position in range(stop):
            row, column = self._slot(name, position)
            if position >= start:
                row[column] = values[position] + UNKNOWN
            held = row[column]
            assert held is not None and held[:32] == values[position], f"{name}: wrong KV at {position}"
            if position < start and held[32:] != values[position + 1]:
                assert held[32:] != UNKNOWN, f"{name}: no drafter has been at {position}"
                self.foreign.add(position + 1)

    def _compute(self, name: str, num_tokens: int) -> list[int]:
        request, known = self.scheduler.requests[name], self.model_tokens[name]
        start = min(request.num_computed_tokens - num_tokens, len(known) - 1)
        sampled = super()._compute(name, num_tokens)
        values = kv_of(request, known)
        for position in range(start, min(start + num_tokens, len(known) - 1)):
            row, column = self._slot(name, position)
            row[column] = values[position] + values[position + 1]
        for position in range(len(known) - 1, len(known) - 2 + self.DRAFTS) if sampled else ():
            row, column = self._slot(name, position)
            row[column] = UNKNOWN + UNKNOWN  # of drafts, from the drafter's own hidden states
        return sampled

    def _slot(self, name: str, position: int) -> tuple[list[bytes | None], int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        at = position // BLOCK
        return (self.worker.memory[table[at]] if at < len(table) else [None] * BLOCK), position % BLOCK


# --- in the scheduler ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
def test_what_is_saved_of_drafters_is_final(tmp_path: Path, ahead: bool) -> None:
    node = Node()
    texts = [prompt(number, CHUNK - 3 + number) for number in range(8)]
    writer = Eagle(node, tmp_path / "head", ahead=ahead, write_back=True)
    alone = [Engine(Node()).generate("a", text, max_tokens=ANSWER) for text in texts]
    for number, text in enumerate(texts):
        writer.submit(f"a{number}", text, max_tokens=ANSWER)
    writer.run(1_000)
    assert writer.accepted > 100 and writer.rejected > 100
    assert [writer.tokens[f"a{number}"] for number in range(8)] == alone
    writer.assert_nothing_left()
    for number, text in enumerate(texts):
        reader = Eagle(node, tmp_path / "head", ahead=ahead, save=False)
        reader.generate("b", [*text, *alone[number], *MORE], max_tokens=8)
        final = len(text) + ANSWER - 1
        assert reader.half.shared.stats.pulled_tokens == final - final % CHUNK
        assert not reader.foreign, "the same continuation"
        reader.assert_nothing_left()


def test_where_prompts_part_at_a_chunk_one_slot_is_of_another(tmp_path: Path) -> None:
    """The key of a chunk does not know what comes behind it. Tokens are right all the same: drafts are verified."""
    node, head = Node(), tmp_path / "head"
    common = prompt(1, 2 * CHUNK)
    Eagle(node, head).generate("a", [*common, *prompt(2, 40)])
    reader = Eagle(node, head)
    text = [*common, *prompt(3, 40)]
    assert reader.generate("b", text, max_tokens=20) == Engine(Node()).generate("b", text, max_tokens=20)
    assert reader.half.shared.stats.pulled_tokens == 2 * CHUNK
    assert reader.foreign == {2 * CHUNK}
    reader.assert_nothing_left()


def test_an_engine_with_drafts_shares_with_its_like_alone(tmp_path: Path) -> None:
    node, head, text = Node(), tmp_path / "head", prompt(1, 3 * CHUNK + 5)
    writer = Engine(node)
    answer = writer.generate("a", text)
    reader = Eagle(node, head)
    assert reader.generate("a", text, params=writer.params["a"]) == answer
    assert reader.half.shared.stats.pulled_tokens == 0
    assert [str(reason) for reason in reader.half.shared.stats.misses] == ["manifest_differs"]
    like = Eagle(node, head)
    assert like.generate("b", text) == answer
    assert like.half.shared.stats.pulled_tokens == 3 * CHUNK


def test_a_local_hit_without_its_last_block_is_completed_by_the_store(tmp_path: Path) -> None:
    """vLLM computes that block again, or we bring it."""
    node, head, text = Node(), tmp_path / "head", prompt(1, 2 * CHUNK + 5)
    engine = Eagle(node, head)
    answer = engine.generate("a", text)
    assert engine.generate("b", text) == answer
    assert engine.half.shared.stats.pulled_tokens == BLOCK
    assert not engine.foreign
    engine.assert_nothing_left()


# --- what is refused ----------------------------------------------------------------------------------


def drafts_by(method: str, tp: int = 1) -> Any:
    parallel = SimpleNamespace(tensor_parallel_size=tp)
    return SimpleNamespace(method=method, uses_draft_kv_cache=lambda: True, draft_parallel_config=parallel)


@pytest.mark.parametrize(
    ("drafts", "groups", "reason"),
    [
        (drafts_by("dflash"), 1, "KV of speculative decoding by dflash is not supported yet"),
        (drafts_by("dspark"), 1, "by dspark"),
        (drafts_by("extract_hidden_states"), 1, "by extract_hidden_states"),
        (drafts_by("eagle", tp=2), 1, "another tensor parallel size"),
        (drafts_by("mtp"), 2, "drafts beside several KV cache groups"),
        (drafts_by("eagle"), 1, None),
        (drafts_by("eagle3"), 1, None),
        (drafts_by("mtp"), 1, None),
        (drafts_by("draft_model"), 1, None),
    ],
)
def test_drafters_that_are_understood(drafts: Any, groups: int, reason: str | None) -> None:
    engine = Engine(Node())
    engine.config.speculative_config = drafts
    config = kv_cache_config(10)
    group = config.kv_cache_groups[0]
    more = [KVCacheGroupSpec([f"more.{number}"], group.kv_cache_spec) for number in range(1, groups)]
    config = replace(config, kv_cache_groups=[replace(group, is_eagle_group=True), *more])
    found = unsupported_engine(engine.config, config)
    assert found is None if reason is None else reason in str(found)


# --- in the geometry ----------------------------------------------------------------------------------


def test_draft_layers_are_lanes_behind_those_of_the_model() -> None:
    """vLLM numbers them on, or names them apart; they may have other heads."""
    names = ["draft_model.model.layers.0.attn", "model.layers.10.attn", "model.layers.9.attn"]
    assert in_order(names) == ["model.layers.9.attn", "model.layers.10.attn", names[0]]
    engine = make_engine([full_spec(heads=3), full_spec(heads=3), full_spec(heads=1)])
    engine.config.kv_cache_groups[0].is_eagle_group = True
    caches = engine.understood()
    assert caches.geometry.lanes == ((2, 3, 32 * 2 * 16 * 4), (1, 1, 32 * 2 * 16 * 4))
    out = bytearray(caches.object_bytes(2))
    caches.gather([5, 3], memoryview(out))
    assert bytes(out) == engine.bytes_of([5, 3])


def test_beside_several_groups_the_worker_half_refuses_them_as_well() -> None:
    engine = make_engine([full_spec()] * 2)
    engine.config.kv_cache_groups *= 2
    engine.config.kv_cache_groups[0].is_eagle_group = True
    with pytest.raises(LayoutUnsupported, match="draft layers beside"):
        kind_caches.understand(engine.tensors, engine.config, vllm_config())


def test_with_a_pipeline_they_are_on_the_last_stage() -> None:
    def stage(*names: str) -> Handshake:
        return Handshake("f", "d", 16, tuple(Layer(f"{name}.attn", 2, 64) for name in names))

    stages = {(0, 0): stage("model.layers.0"), (1, 0): stage("model.layers.1", "draft_model.model.layers.0")}
    assert put_together(stages, 2).shape.firsts == (0, 1, 3)
    stages = {(0, 0): stage("model.layers.0", "draft_model.model.layers.0"), (1, 0): stage("model.layers.1")}
    with pytest.raises(LayoutUnsupported, match="consecutive"):
        put_together(stages, 2)


# --- in the manifest ----------------------------------------------------------------------------------


@cache
def engine_config() -> Any:
    return Engine(Node()).config


def facts(folder: Path, **more: Any) -> ModelFacts:
    config = engine_config()
    config.speculative_config = settings(config, folder, **more)
    return model_facts(config)


def manifest(of: ModelFacts) -> Any:
    whole = Whole("cpu-vec", "float32", Shape(Geometry(16, (LaneGroup(3, 1, 64),)), (0, 3), 1))
    return build_manifest(of, "weights", whole, CHUNK)


def test_what_makes_drafts_is_in_the_manifest(tmp_path: Path) -> None:
    own = facts(tmp_path / "head")
    one = manifest(own)
    assert one.model["drafts.engine.method"] == "eagle"
    assert describe_format(one).endswith("with drafts by eagle")
    plain = manifest(replace(own, drafts=None))
    assert one.namespace != plain.namespace
    assert "drafts" not in describe_format(plain)
    assert manifest(facts(tmp_path / "elsewhere")) == one, "wherever its files are"
    assert manifest(facts(tmp_path / "head", num_speculative_tokens=5)) == one, (
        "the same KV, however many drafts"
    )


def test_weights_of_drafts_count(tmp_path: Path) -> None:
    model, head, other = (tmp_path / name for name in ("model", "head", "other"))
    for folder in (model, head, other):
        folder.mkdir()
        (folder / "pytorch_model.bin").write_bytes(folder.name.encode())
    alone = ModelFacts(model, "auto", (1, 1), 4096)
    drafts = ModelFacts(head, "auto", (1, 1), 4096)
    own = weights_identity(replace(alone, drafts=drafts))
    assert own == f"{weights_identity(alone)} drafts:{weights_identity(drafts)}"
    assert own != weights_identity(replace(alone, drafts=replace(drafts, weights=other)))
    assert weights_identity(replace(alone, drafts=drafts), "mine") == "version:mine"
    in_the_model = replace(alone, drafts=replace(drafts, weights=model))
    assert weights_identity(in_the_model) == weights_identity(alone), "MTP: its files are read once"
