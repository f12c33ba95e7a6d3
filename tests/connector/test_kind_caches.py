"""Objects of windows, local attention and states: which bytes of which groups they hold, and what stays untouched.

Mutants that must fail here: layers in the order of groups instead of the model's; the blocks of one group for all;
the padding behind a state as part of it; a kind's layers with the shape of the full one.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from connector.compat import ModelFacts
from connector.identity import build_manifest
from connector.kinds import Kind, kinds_of
from connector.metadata import Handshake, Rank
from connector.shape import LayoutUnsupported, put_together
from tests.connector.caches import full_spec
from tests.connector.hybrids import (
    BLOCK,
    GEMMA,
    LLAMA4,
    QWEN,
    Hybrid,
    make_hybrid,
    state_spec,
    window_spec,
)

FACTS = ModelFacts(Path("model"), "auto", (1, 1), 4_096)
MODELS = {"gemma": GEMMA, "llama4": LLAMA4, "qwen": QWEN}


def blocks_of(kind: Kind, count: int, seed: int) -> list[list[int]]:
    """Other blocks for every group."""
    chosen = np.random.default_rng(seed).permutation(15)[: count * len(kind.groups)] + 1
    return [[int(b) for b in chosen[n * count : (n + 1) * count]] for n in range(len(kind.groups))]


def object_of(hybrid: Hybrid, kind: Kind, blocks: list[list[int]]) -> bytes:
    """The truth."""
    owner = {
        name: place
        for place, group in enumerate(kind.groups)
        for name in hybrid.config.kv_cache_groups[group].layer_names
    }
    names = sorted(owner, key=lambda name: int(name.split(".")[2]))
    return hybrid.bytes_of(names, {name: blocks[place] for name, place in owner.items()})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("model", MODELS)
def test_an_object_holds_the_layers_of_its_kind_in_order(model, device, monkeypatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: None
    )  # the tensors are on this machine all the same
    hybrid, other = make_hybrid(MODELS[model], seed=1), make_hybrid(MODELS[model], seed=2)
    kinds = kinds_of(hybrid.config.kv_cache_groups)
    assert len(kinds) == 2
    for number, kind in enumerate(kinds):
        count = 1 if number and model == "qwen" else 3
        blocks = blocks_of(kind, count, seed=number)
        truth = object_of(hybrid, kind, blocks)
        data = bytearray(len(truth))
        flat = [block for some in blocks for block in some]
        hybrid.understood(device).of(number).gather(flat, memoryview(data))
        assert bytes(data) == truth
        elsewhere = blocks_of(kind, count, seed=10 + number)
        before = other.memory.copy()
        other.understood(device).of(number).scatter(memoryview(data), [b for some in elsewhere for b in some])
        assert object_of(other, kind, elsewhere) == truth
        assert 0 < (other.memory != before).sum() <= len(truth)


def test_a_block_that_is_not_wanted_stays_as_it_was() -> None:
    hybrid = make_hybrid(GEMMA)
    kind = kinds_of(hybrid.config.kv_cache_groups)[1]
    before = object_of(hybrid, kind, [[1, 2], [3, 4]])
    data = bytes(len(before))
    hybrid.understood().of(1).scatter(memoryview(bytearray(data)), [None, 2, 3, None])
    assert object_of(hybrid, kind, [[1], [4]]) == object_of(make_hybrid(GEMMA), kind, [[1], [4]])
    assert not any(object_of(hybrid, kind, [[2], [3]]))


def test_handshakes_make_the_shapes_of_all_kinds() -> None:
    hand = make_hybrid(GEMMA).understood().handshake
    assert [len(hand.layers), *(len(kind.layers) for kind in hand.kinds)] == [2, 4]
    shape = put_together({(0, 0): hand, (0, 1): hand}, 4).shape
    assert shape.of(0).geometry.num_runs == 2 * 4
    assert shape.of(1).geometry.num_runs == 4 * 4
    size = shape.of(1).geometry.object_bytes(2 * BLOCK)
    parts = [shape.of(1).part(Rank(0, tp), size) for tp in range(2)]
    assert sum(part.size_bytes for part in parts) == size


def test_states_are_those_of_a_rank_and_heads_are_not() -> None:
    """So engines with states share KV only with those of their TP size."""
    hybrid = make_hybrid(QWEN)
    hand = hybrid.understood().handshake
    wholes = [put_together({(0, tp): hand for tp in range(size)}, 2 * size) for size in (1, 2)]
    kinds = kinds_of(hybrid.config.kv_cache_groups)
    namespaces = {build_manifest(FACTS, "weights", whole, 4 * BLOCK, kinds).namespace for whole in wholes}
    assert len(namespaces) == 2
    one, two = (whole.shape for whole in wholes)
    assert one.of(1).geometry.lanes[0] == (2, 1, 160)
    assert two.of(1).geometry.lanes[0] == (2, 2, 160)
    assert all(two.of(1).writes(Rank(0, tp)) for tp in range(2))


def test_ranks_with_other_kinds_are_not_understood() -> None:
    hand = make_hybrid(GEMMA).understood().handshake
    alone = Handshake(hand.tile_format, hand.kv_dtype, hand.unit_tokens, hand.layers)
    with pytest.raises(LayoutUnsupported, match="different kinds"):
        put_together({(0, 0): hand, (0, 1): alone}, 4)


def test_layers_that_differ_in_dtype_are_not_understood() -> None:
    groups = [((0,), window_spec(64, dtype=torch.bfloat16, head_size=32)), ((1,), full_spec(BLOCK))]
    with pytest.raises(LayoutUnsupported, match="differ in kind"):
        make_hybrid(groups).understood()


def test_a_state_of_several_blocks_is_not_understood() -> None:
    hybrid = make_hybrid(QWEN)
    name = "model.layers.0.attn"
    hybrid.tensors[name] = hybrid.tensors[name][:8]
    with pytest.raises(LayoutUnsupported, match="one state in each block"):
        hybrid.understood()
    assert state_spec().page_size_bytes == 160


def test_heads_of_windows_are_shared_between_tp_sizes() -> None:
    """gpt-oss: what two ranks have written is what one reads, and the other way round."""
    whole = make_hybrid([((0, 2), window_spec(128, heads=4)), ((1, 3), full_spec(BLOCK, 4))], seed=5)
    ranks = [
        make_hybrid([((0, 2), window_spec(128)), ((1, 3), full_spec(BLOCK))], seed=tp) for tp in range(2)
    ]
    for tp, rank in enumerate(ranks):
        for name, tensor in rank.tensors.items():
            tensor.copy_(whole.tensors[name][:, 2 * tp : 2 * tp + 2])
    shape = put_together({(0, tp): rank.understood().handshake for tp, rank in enumerate(ranks)}, 4).shape
    assert replace(put_together({(0, 0): whole.understood().handshake}, 4).shape, tp_size=2).kinds[
        0
    ].geometry == (shape.kinds[0].geometry)
    for number in range(2):
        size = shape.of(number).geometry.object_bytes(2 * BLOCK)
        alone = bytearray(size)
        whole.understood().of(number).gather([3, 7], memoryview(alone))
        together = bytearray(size)
        for tp, rank in enumerate(ranks):
            part = shape.of(number).part(Rank(0, tp), size)
            mine = bytearray(part.size_bytes)
            rank.understood().of(number).gather([3, 7], memoryview(mine))
            at = 0
            for offset, length in part.spans:
                together[offset : offset + length] = mine[at : at + length]
                at += length
        assert together == alone
