"""Engine blocks to objects and back, on tensors that vLLM's own code has made.

Mutants that were tried and are caught: heads of a tile reversed; layers in the order of their names as text; kernel
blocks taken for blocks; None written as block 0; layers at uneven distances taken for even ones; equal slabs not
one group of lanes; overlapping tiles accepted.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec, SlidingWindowSpec

from connector.metadata import Layer
from connector.shape import LayoutUnsupported
from connector.tensors import KVCaches, understand
from kvstore.core import LaneGroup
from tests.connector.caches import Engine, full_spec, make_engine, mla_spec, vllm_config

GPU_LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"]  # all there are


def gathered(caches: KVCaches, blocks: list[int]) -> bytes:
    out = bytearray(caches.object_bytes(len(blocks)))
    caches.gather(blocks, memoryview(out))
    return bytes(out)


@st.composite
def engines(draw: st.DrawFn) -> tuple[Engine, str]:
    device = draw(st.sampled_from(["cpu", "cuda"]))
    layout = "LBHNC" if device == "cpu" else draw(st.sampled_from(GPU_LAYOUTS))
    split = draw(st.sampled_from([1, 2])) if device == "cuda" and layout == "LBHNC" else 1
    specs = [full_spec(32, draw(st.integers(1, 3)), draw(st.sampled_from([16, 48])))] * draw(
        st.integers(1, 3)
    )
    if layout == "LBHNC" and split == 1 and draw(st.booleans()):
        specs += [full_spec(32, draw(st.integers(1, 3)), 80)] * draw(st.integers(1, 2))
    return make_engine(specs, layout=layout, kernel_blocks=split, seed=draw(st.integers(0, 99))), device


@given(engines(), st.permutations(range(1, 8)), st.integers(1, 4))
def test_gather_gives_the_object_lane_by_lane_token_by_token(
    made: tuple[Engine, str], order: list[int], num_blocks: int
) -> None:
    engine, device = made
    blocks = order[:num_blocks]
    assert gathered(engine.understood(device), blocks) == engine.bytes_of(blocks)


@given(engines(), st.permutations(range(1, 8)), st.lists(st.booleans(), min_size=1, max_size=4))
def test_scatter_restores_what_was_gathered_and_touches_nothing_else(
    made: tuple[Engine, str], order: list[int], kept: list[bool]
) -> None:
    engine, device = made
    caches, blocks = engine.understood(device), order[: len(kept)]
    data = bytearray(gathered(caches, blocks))
    engine.fill(seed=1000)
    before = {block: engine.bytes_of([block]) for block in range(8)}
    caches.scatter(
        memoryview(data), [block if keep else None for block, keep in zip(blocks, kept, strict=True)]
    )
    written = {block for block, keep in zip(blocks, kept, strict=True) if keep}
    assert {block for block in range(8) if engine.bytes_of([block]) != before[block]} == written
    if all(kept):
        assert engine.bytes_of(blocks) == data


def test_geometry_describes_what_is_gathered() -> None:
    engine = make_engine([full_spec(32, 3, 16)] * 2 + [full_spec(32, 1, 48)])
    caches = engine.understood()
    geometry = caches.geometry
    assert (geometry.unit_tokens, geometry.lanes) == (32, (LaneGroup(2, 3, 4096), LaneGroup(1, 1, 12288)))
    data = gathered(caches, [5, 2])
    assert len(data) == geometry.object_bytes(64)
    lanes = [(name, head) for name, tensor in engine.tensors.items() for head in range(tensor.shape[1])]
    for (name, head), (_, offset, size) in zip(lanes, geometry.runs(len(data)), strict=True):
        tiles = b"".join(engine.tensors[name][block, head].numpy().tobytes() for block in (5, 2))
        assert data[offset : offset + size] == tiles


def test_on_cpu_the_tile_format_names_the_instruction_set() -> None:
    caches = make_engine([full_spec(32, 2, 16)]).understood()
    assert (caches.tile_format, caches.kv_dtype) == ("cpu-vec16", "float32")  # a head of 16 is packed by 16
    assert make_engine([full_spec(32, 2, 64)]).understood().tile_format == "cpu-vec"


def test_on_gpu_block_sizes_do_not_matter() -> None:
    """Two engines whose blocks have 16 and 32 tokens, the latter in two kernel blocks, hold the same tokens."""
    small = make_engine([full_spec(16)] * 2).understood("cuda")
    large_engine = make_engine([full_spec(32)] * 2, kernel_blocks=2, seed=2)
    large = large_engine.understood("cuda")
    assert small.geometry == large.geometry
    assert small.geometry.unit_tokens == 1
    data = bytearray(gathered(small, [3, 1, 6, 2]))
    large.scatter(memoryview(data), [7, 4])
    assert large_engine.bytes_of([7, 4]) == data


def test_mla_is_one_lane_per_layer() -> None:
    caches = make_engine([mla_spec()] * 3).understood("cuda", backend="FLASHMLA")
    assert (caches.tile_format, caches.kv_dtype) == ("gpu-mla", "bfloat16")
    assert caches.geometry.lanes == (LaneGroup(3, 1, 48),)


def test_layers_are_in_the_order_of_the_model() -> None:
    """With eleven layers the order of names as text, or of vLLM's dictionary, is not that of numbers."""
    engine = make_engine([full_spec(32, 1, 16)] * 11)
    names = list(engine.tensors)
    engine.config.kv_cache_groups[0].layer_names.reverse()
    assert gathered(engine.understood(), [1]) == engine.bytes_of([1], names)


def test_layers_at_uneven_distances_are_one_group_of_lanes() -> None:
    """How vLLM places layers must not show in the manifest. Here the third of five is not in the group."""
    engine = make_engine([full_spec()] * 5)
    names = [name for name in engine.tensors if name != "model.layers.2.attn"]
    engine.config.kv_cache_groups[0].layer_names.remove("model.layers.2.attn")
    caches = engine.understood()
    assert caches.geometry.lanes == (LaneGroup(4, 2, 4096),)
    assert gathered(caches, [3, 1]) == engine.bytes_of([3, 1], names)


def test_a_layer_that_shares_the_kv_of_another_is_skipped() -> None:
    engine = make_engine([full_spec()] * 2)
    names = list(engine.tensors)
    engine.tensors["model.layers.9.attn"] = engine.tensors[names[0]]
    caches = engine.understood()
    assert caches.geometry.num_layers == 2
    assert gathered(caches, [4]) == engine.bytes_of([4], names)


def test_the_handshake_says_what_the_manifest_needs() -> None:
    shake = make_engine([full_spec(32, 2, 64)] * 2).understood(dtype=torch.float32).handshake
    assert (shake.tile_format, shake.kv_dtype, shake.unit_tokens) == ("cpu-vec", "float32", 32)
    assert shake.layers == tuple(Layer(f"model.layers.{n}.attn", 2, 16384) for n in range(2))
    assert shake.unsupported is None


def test_fp8_has_one_name() -> None:
    engine = make_engine([full_spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)])
    assert engine.understood("cuda", cache_dtype="fp8").kv_dtype == "fp8_e4m3"
    assert engine.understood("cuda", cache_dtype="fp8_e5m2").kv_dtype == "fp8_e5m2"


@pytest.mark.parametrize("block", [0, 8, -1])
def test_blocks_that_nobody_may_write_are_our_bug(block: int) -> None:
    caches = make_engine([full_spec()]).understood()
    data = memoryview(bytearray(caches.object_bytes(1)))
    with pytest.raises(AssertionError, match="is not one of 1 to 7"):
        caches.scatter(data, [block])
    with pytest.raises(AssertionError, match="are not the object of 2 blocks"):
        caches.scatter(data, [1, 2])


# --- what is not understood is refused, with its reason -------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (full_spec(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), "int8_per_token_head"),
        (full_spec(page_size_padded=65536), "padded"),
        (full_spec(tokens_per_state=2), "compressed"),
        (full_spec(state_content_bytes=100), "in its own way"),
        (full_spec(num_head_slots=4), "in its own way"),
        (full_spec(sliding_window=128), "window"),
        (full_spec(non_causal=True), "causal"),
        (
            SlidingWindowSpec(
                block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=64
            ),
            "SlidingWindowSpec",
        ),
        (
            MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,)),
            "a recurrent state in cache mode none",
        ),
    ],
)
def test_specs_that_are_not_understood(spec: Any, reason: str) -> None:
    engine = make_engine([full_spec()])
    engine.config.kv_cache_groups[0].kv_cache_spec = spec
    with pytest.raises(LayoutUnsupported, match=reason):
        engine.understood("cuda")


def test_several_groups_are_not_understood() -> None:
    engine = make_engine([full_spec()] * 2)
    engine.config.kv_cache_groups *= 2
    with pytest.raises(LayoutUnsupported, match="2 KV cache groups"):
        engine.understood()


def test_mla_on_cpu_is_token_by_token_and_of_a_format_of_its_own() -> None:
    caches = make_engine([mla_spec()] * 3).understood(backend="CPU_MLA")
    assert (caches.tile_format, caches.unit_tokens) == ("cpu-mla", 1)
    assert [layer.num_heads for layer in caches.layers] == [1, 1, 1]


def test_mla_with_amx_was_not_tested_and_is_refused() -> None:
    with pytest.raises(LayoutUnsupported, match="AMX_MLA"):
        make_engine([mla_spec()]).understood(backend="AMX_MLA")


def test_kernel_blocks_on_cpu_are_refused() -> None:
    with pytest.raises(LayoutUnsupported, match="kernel blocks"):
        make_engine([full_spec(64)], kernel_blocks=2).understood()


def test_backends_that_were_not_read_are_refused() -> None:
    """Their tensors have the shape of all others; what is in them is their own business."""
    with pytest.raises(LayoutUnsupported, match="ROCM_ATTN"):
        make_engine([full_spec()]).understood("cuda", backend="ROCM_ATTN")
    with pytest.raises(LayoutUnsupported, match="FLASH_ATTN"):
        make_engine([mla_spec()]).understood("cuda", backend="FLASH_ATTN")


def test_other_devices_are_refused() -> None:
    with pytest.raises(LayoutUnsupported, match="kind xpu"):
        make_engine([full_spec()]).understood("xpu")


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_tiles_that_cannot_be_cut_must_lie_in_one_piece(layout: str) -> None:
    with pytest.raises(LayoutUnsupported, match="use the KV cache layout LBHNC"):
        make_engine([full_spec()] * 2, layout=layout).understood("cpu")


def test_a_shape_that_is_not_the_announced_one_is_refused() -> None:
    engine = make_engine([full_spec()] * 2)
    name = next(iter(engine.tensors))
    for wrong, reason in (
        (engine.tensors[name][:, :1], "heads, tokens and bytes"),
        (engine.tensors[name][:5], "do not hold the 8 blocks"),
        (engine.tensors[name].flatten(2), "is no \\[blocks, heads, tokens, content\\]"),
    ):
        with pytest.raises(LayoutUnsupported, match=reason):
            understand({**engine.tensors, name: wrong}, engine.config, vllm_config())
    del engine.tensors[name]
    with pytest.raises(LayoutUnsupported, match="registered no tensor"):
        engine.understood()


def test_tiles_that_overlap_are_refused() -> None:
    engine = make_engine([full_spec()])
    name, tensor = next(iter(engine.tensors.items()))
    stride = (tensor.stride(0) // 2, *tensor.stride()[1:])
    engine.tensors[name] = tensor.as_strided(tensor.shape, stride)
    with pytest.raises(LayoutUnsupported, match="tiles overlap"):
        engine.understood("cuda")


def test_layers_that_the_cpu_packs_in_different_ways_are_refused() -> None:
    """One name stands for all tiles of an object; on another host it could stand for others."""
    with pytest.raises(LayoutUnsupported, match="tiles differ in kind"):
        make_engine([full_spec(32, 2, 16), full_spec(32, 2, 64)]).understood()


def test_layers_of_different_kind_are_refused() -> None:
    engine = make_engine([full_spec(16), mla_spec(16, dtype=torch.float32)])
    with pytest.raises(LayoutUnsupported, match="dtype or kind"):
        engine.understood("cuda")


def test_layers_of_different_block_size_are_refused() -> None:
    engine = make_engine([full_spec(), full_spec(heads=1)])
    specs = engine.config.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    name = next(iter(specs))
    specs[name] = replace(specs[name], block_size=64)
    with pytest.raises(LayoutUnsupported, match="different block size"):
        engine.understood()
