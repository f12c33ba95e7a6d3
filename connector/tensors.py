"""vLLM's KV cache tensors, seen as the lanes of objects. Only `copies`, `kind_caches`, `pinning` and this know torch.

vLLM registers one view `[blocks, heads, tokens, content]` per layer, all over one allocation, in any physical
order. Layers of one shape that lie at a constant distance form a *slab*; an object is, per slab and block, one
strided copy (`connector.copies`).

What is inside a tile, the `tokens x content` of a (block, layer, head), is the *tile format*. On CPU it is packed by
instruction set and cannot be cut: one tile is one unit. On GPU it is token-major: the tokens of a lane follow
each other through tiles, blocks and kernel blocks, so a unit is one token, and engines of different block sizes
and of any layout share objects. (Layouts whose heads are not contiguous, LBNHC and BLNHC, are moved by tokens.)

Anything that is not provably of this shape raises `LayoutUnsupported` with one reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from connector.compat import (
    attention_backends,
    attention_isa,
    is_mla,
    layer_specs,
    reach_of,
    unsupported_spec,
)
from connector.copies import Copies, DeviceCopies, Fence, HostCopies
from connector.metadata import Handshake, Layer
from connector.shape import CPU_MLA, STATE, LayoutUnsupported, in_order, lanes_of
from kvstore.core import Geometry

# GPU backends whose source was read: a token of a head is its keys, then its values (MLA: one latent vector).
_TOKEN_MAJOR = frozenset({"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"})
_TOKEN_MAJOR_MLA = frozenset({"CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA"})
# On CPU; AMX_MLA keeps the same vectors, but no machine was there to test it on.
_CPU_MLA_BACKENDS = frozenset({"CPU_MLA"})


@dataclass(frozen=True)
class KVCaches:
    """The registered KV cache of one rank, understood and checked.

    Args:
        tile_format: what is inside a tile.
        kv_dtype: dtype of the cache, as vLLM names it.
        block_tokens: tokens of an engine block.
        layers: this rank's, in the order of the model.
        unit_tokens: tokens of a unit; see `kvstore.core.Manifest`.
        num_blocks: engine blocks; block 0 is vLLM's null block.
        copies: moves bytes.
    """

    tile_format: str
    kv_dtype: str
    block_tokens: int
    layers: tuple[Layer, ...]
    unit_tokens: int
    num_blocks: int
    copies: Copies

    @property
    def handshake(self) -> Handshake:
        """What the scheduler half needs for the manifest."""
        return Handshake(self.tile_format, self.kv_dtype, self.unit_tokens, self.layers)

    @property
    def geometry(self) -> Geometry:
        """The shape of this rank's part of objects."""
        return Geometry(self.unit_tokens, lanes_of(self.layers))

    def object_bytes(self, num_blocks: int) -> int:
        """Size of this rank's part of the object of so many engine blocks."""
        return self.geometry.object_bytes(num_blocks * self.block_tokens)

    def of(self, kind: int) -> "KVCaches":
        """The layers of this kind: there is one kind alone."""
        assert kind == 0, f"a job for kind {kind} of a model of one kind"
        return self

    def fence(self) -> Fence:
        """See `Copies.fence`."""
        return self.copies.fence()

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence = None) -> None:
        """See `Copies.gather`."""
        self._check(blocks, len(out))
        self.copies.gather(blocks, out, after)

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence = None) -> None:
        """See `Copies.scatter`."""
        self._check(blocks, len(data))
        self.copies.scatter(data, blocks, after)

    def _check(self, blocks: Sequence[int | None], size_bytes: int) -> None:
        assert size_bytes == self.object_bytes(len(blocks)), (
            f"{size_bytes} bytes are not the object of {len(blocks)} blocks"
        )
        for block in blocks:
            assert block is None or 0 < block < self.num_blocks, (
                f"block {block} is not one of 1 to {self.num_blocks - 1}"
            )


def understand(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, vllm_config: Any, device: str | None = None
) -> KVCaches:
    """The registered tensors as lanes of objects.

    Args:
        kv_caches: layer name to its `[blocks, heads, tokens, content]` view.
        kv_cache_config: vLLM's description of the same.
        vllm_config: vLLM's configuration.
        device: "cpu" or "cuda"; that of the tensors unless told.

    Raises:
        LayoutUnsupported: not provably of a shape that is understood here.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise LayoutUnsupported(f"a model with {len(groups)} KV cache groups has more than one kind of KV")
    specs = specs_of(groups[0], kv_caches)
    if alone := next((spec for spec in specs.values() if reach_of(spec)[0] != "full"), None):
        raise LayoutUnsupported(f"KV of kind {type(alone).__name__} alone is not supported yet")
    return understand_layers(specs, kv_caches, kv_cache_config.num_blocks, vllm_config, device)


def understand_layers(
    specs: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    vllm_config: Any,
    device: str | None = None,
) -> KVCaches:
    """The same for some layers of attention, given with their specs and in their order, whose blocks are the same."""
    if len({(spec.block_size, spec.dtype, is_mla(spec)) for spec in specs.values()}) != 1:
        raise LayoutUnsupported("layers of different block size, dtype or kind are not supported yet")
    device = device or next(iter(kv_caches.values())).device.type
    split = _kernel_blocks_per_block(kv_caches, specs, num_blocks)
    first = next(iter(specs.values()))
    if device == "cuda" or is_mla(first):
        _check_backends(specs, vllm_config, device)
    formats = {_tile_format(device, spec, split, vllm_config) for spec in specs.values()}
    if len(formats) != 1:
        raise LayoutUnsupported(f"layers whose tiles differ in kind are not supported: {sorted(formats)}")
    [(tile_format, unit_tokens)] = formats
    data = {name: _bytes_of(name, kv_caches[name], spec, split) for name, spec in specs.items()}
    if unit_tokens > 1:
        _check_whole_tiles(data)
    return KVCaches(
        tile_format=tile_format,
        kv_dtype=_dtype_name(first, vllm_config.cache_config.cache_dtype),
        block_tokens=first.block_size,
        layers=tuple(_layer(name, layer, unit_tokens) for name, layer in data.items()),
        unit_tokens=unit_tokens,
        num_blocks=num_blocks,
        copies=_copies([_by_rows(layer) for layer in data.values()], device, split),
    )


def understand_states(
    specs: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    device: str | None = None,
) -> KVCaches:
    """The same for layers with a recurrent state, one in each block: opaque bytes, without the padding behind."""
    device = device or next(iter(kv_caches.values())).device.type
    data = {}
    for name, spec in specs.items():
        if kv_caches[name].shape[0] != num_blocks:
            raise LayoutUnsupported(f"layer {name} does not have one state in each block")
        data[name] = _bytes_of(name, kv_caches[name], spec, spec.block_size)
    return KVCaches(
        tile_format=STATE,
        kv_dtype="opaque",
        block_tokens=1,  # a state is the unit here, and a block holds one
        layers=tuple(Layer(name, 1, int(layer.shape[3])) for name, layer in data.items()),
        unit_tokens=1,
        num_blocks=num_blocks,
        copies=_copies(list(data.values()), device, 1),
    )


def _copies(layers: Sequence[torch.Tensor], device: str, split: int) -> Copies:
    slabs = _slabs(layers)
    return HostCopies(slabs, split) if device == "cpu" else DeviceCopies(slabs, split)


# --- what vLLM says -----------------------------------------------------------------------------------


def specs_of(group: Any, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Layer name to spec, in the order of the model, drafts behind it. Layers that share the KV of others are in no
    group: skipped."""
    specs = layer_specs(group)
    for spec in specs.values():
        if reason := unsupported_spec(spec):
            raise LayoutUnsupported(reason)
    if missing := [name for name in specs if name not in kv_caches]:
        raise LayoutUnsupported(f"vLLM registered no tensor for layer {missing[0]}")
    return {name: specs[name] for name in in_order(specs)}


def _kernel_blocks_per_block(
    kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, Any], num_blocks: int
) -> int:
    """A kernel may see a block as several smaller ones; they lie side by side."""
    ratios = {divmod(kv_caches[name].shape[0], num_blocks) for name in specs}
    if len(ratios) != 1 or next(iter(ratios))[1] or not next(iter(ratios))[0]:
        raise LayoutUnsupported(f"tensors do not hold the {num_blocks} blocks that vLLM announced")
    return next(iter(ratios))[0]


def _check_backends(specs: Mapping[str, Any], vllm_config: Any, device: str) -> None:
    """A shape does not tell what a backend puts into it."""
    on_gpu = {True: _TOKEN_MAJOR_MLA, False: _TOKEN_MAJOR}
    for name, spec in specs.items():
        known = on_gpu[is_mla(spec)] if device == "cuda" else _CPU_MLA_BACKENDS
        unknown = attention_backends(vllm_config, [name]) - known
        if unknown:
            raise LayoutUnsupported(
                f"what the attention backend {unknown.pop()} keeps per token is not known here"
            )


def _tile_format(device: str, spec: Any, split: int, vllm_config: Any) -> tuple[str, int]:
    """The name of what is inside a tile, and tokens per unit."""
    if device == "cuda":
        return ("gpu-mla" if is_mla(spec) else "gpu-kv"), 1
    if device != "cpu":
        raise LayoutUnsupported(f"KV on a device of kind {device} is not supported yet")
    if is_mla(spec):
        return CPU_MLA, 1
    if split != 1:
        raise LayoutUnsupported("kernel blocks smaller than --block-size are not supported on CPU")
    return f"cpu-{attention_isa(vllm_config, spec)}", spec.block_size


def _dtype_name(spec: Any, cache_dtype: str) -> str:
    """As vLLM names it, aliases resolved."""
    if cache_dtype in {"auto", ""}:
        return str(spec.dtype).removeprefix("torch.")
    return {"fp8": "fp8_e4m3"}.get(cache_dtype, cache_dtype)


# --- what the tensors are -----------------------------------------------------------------------------


def _bytes_of(name: str, tensor: torch.Tensor, spec: Any, split: int) -> torch.Tensor:
    """The layer as bytes `[kernel blocks, heads, tokens, content]`, its shape and strides checked."""
    expected = (spec.num_heads, spec.block_size // split, spec.state_content_size_bytes)
    if tensor.dim() != 4:
        raise LayoutUnsupported(f"layer {name} is no [blocks, heads, tokens, content]: {tuple(tensor.shape)}")
    if tensor.stride(3) != 1:
        raise LayoutUnsupported(f"the content of a token is not contiguous in layer {name}")
    data = tensor.view(torch.uint8)
    if tuple(data.shape[1:]) != expected or spec.block_size % split:
        raise LayoutUnsupported(
            f"layer {name} has {tuple(data.shape[1:])} heads, tokens and bytes, not {expected}"
        )
    return data


def _check_whole_tiles(layers: Mapping[str, torch.Tensor]) -> None:
    """What cannot be cut must lie in one piece."""
    for name, data in layers.items():
        if data.stride(2) != data.shape[3]:
            raise LayoutUnsupported(
                f"the tokens of a head are not contiguous in layer {name} (strides in bytes: {data.stride()}); "
                "use the KV cache layout LBHNC: unset VLLM_KV_CACHE_LAYOUT"
            )


def _by_rows(data: torch.Tensor) -> torch.Tensor:
    """The layer as `[kernel blocks, heads, rows, bytes]`: one row per tile if its tokens are contiguous."""
    if data.stride(2) != data.shape[3]:
        return data
    blocks, heads, tokens, content = data.shape
    strides = (data.stride(0), data.stride(1), tokens * content, 1)
    return torch.as_strided(data, (blocks, heads, 1, tokens * content), strides, data.storage_offset())


def _layer(name: str, data: torch.Tensor, unit_tokens: int) -> Layer:
    """Units are tokens, or whole tiles."""
    tokens = 1 if unit_tokens == 1 else data.shape[2]
    return Layer(name, int(data.shape[1]), int(tokens * data.shape[3]))


def _slabs(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive layers of one shape at a constant distance, as `[layers, kernel blocks, heads, rows, bytes]`."""
    slabs: list[torch.Tensor] = []
    together, distance = [layers[0]], 0
    for layer in layers[1:]:
        step = _step(together[-1], layer)
        if step and distance in {0, step}:
            together.append(layer)
            distance = step
        else:
            slabs.append(_stack(together, distance))
            together, distance = [layer], 0
    return [*slabs, _stack(together, distance)]


def _step(one: torch.Tensor, other: torch.Tensor) -> int:
    """Bytes from one layer to the other of the same shape in the same allocation; else 0."""
    alike = one.shape == other.shape and one.stride() == other.stride()
    if not alike or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return 0
    return max(0, int(other.storage_offset() - one.storage_offset()))


def _stack(layers: Sequence[torch.Tensor], distance: int) -> torch.Tensor:
    first = layers[0]
    shape, stride = (len(layers), *first.shape), (distance, *first.stride())
    extent = first.shape[-1]
    for step, count in sorted(zip(stride[:-1], shape[:-1], strict=True)):
        if count > 1 and step < extent:
            raise LayoutUnsupported(f"tiles overlap (shape {shape}, strides in bytes {stride})")
        extent = max(extent, step * count)
    return torch.as_strided(first, shape, stride, first.storage_offset())
