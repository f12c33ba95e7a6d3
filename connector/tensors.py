"""vLLM's KV cache tensors, seen as the lanes of objects. The only file that knows torch.

vLLM registers one view `[blocks, heads, tokens, content]` per layer, all over one allocation. Whatever the
physical order, what an object needs is one thing: that the tile of a (block, layer, head), `tokens x content`,
is contiguous. Layers of one shape that lie at a constant distance form a *slab*, seen here as bytes:

    slab    [layer][block][head][tile]      any strides, tile contiguous        (the engine's memory)
    object  [layer][head][block][tile]      dense, blocks in token order        (staging memory)

so that an object is, per slab and block, one strided copy of whole tiles.

What is inside a tile is the *tile format*. On CPU it is packed by instruction set and cannot be cut: one tile
is one unit. On GPU it is token-major: the tokens of a lane follow each other through tiles, blocks and kernel
blocks, so a unit is one token and engines of different block sizes share objects.

Anything that is not provably of this shape raises `LayoutUnsupported` with one reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from connector.compat import attention_backends, attention_isa, is_mla, layer_specs, unsupported_spec
from connector.metadata import Handshake
from kvstore.core import Geometry, KVStoreError, LaneGroup

# GPU backends whose source was read: a token of a head is its keys, then its values (MLA: one latent vector).
_TOKEN_MAJOR = frozenset({"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"})
_TOKEN_MAJOR_MLA = frozenset({"CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA"})


class LayoutUnsupported(KVStoreError):
    """KV of this shape can be neither saved nor loaded. `str()` is a reason, as half a sentence."""


_Bytes = npt.NDArray[np.uint8]

Fence = Any
"""A point in the order of the device's work (a CUDA event), or None where that work is synchronous."""


class Copies(Protocol):
    """Moves tiles between slabs and objects."""

    def fence(self) -> Fence:
        """What the calling thread has asked of the device so far; later copies may be ordered after it."""

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence) -> None:
        """Fills `out` with the object of these blocks; done when it returns."""

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence) -> None:
        """Writes the object's tiles into these blocks, but not where None stands; done when it returns."""


@dataclass(frozen=True)
class KVCaches:
    """The registered KV cache of one rank, understood and checked.

    Args:
        tile_format: what is inside a tile.
        kv_dtype: dtype of the cache, as vLLM names it.
        block_tokens: tokens of an engine block.
        geometry: the shape of this rank's objects.
        num_blocks: engine blocks; block 0 is vLLM's null block.
        copies: moves bytes.
    """

    tile_format: str
    kv_dtype: str
    block_tokens: int
    geometry: Geometry
    num_blocks: int
    copies: Copies

    @property
    def handshake(self) -> Handshake:
        """What the scheduler half needs for the manifest."""
        lanes = tuple((group.num_layers, group.num_heads, group.unit_bytes) for group in self.geometry.lanes)
        return Handshake(self.tile_format, self.kv_dtype, self.geometry.unit_tokens, lanes)

    def object_bytes(self, num_blocks: int) -> int:
        """Size of the object of so many engine blocks."""
        return self.geometry.object_bytes(num_blocks * self.block_tokens)

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
    specs = _specs(kv_cache_config, kv_caches)
    device = device or next(iter(kv_caches.values())).device.type
    split = _kernel_blocks_per_block(kv_caches, specs, kv_cache_config.num_blocks)
    first = next(iter(specs.values()))
    if device == "cuda":
        _check_backends(specs, vllm_config)
    tile_format, unit_tokens = _tile_format(device, first, split, vllm_config)
    slabs = _slabs([_bytes_of(name, kv_caches[name], spec, split) for name, spec in specs.items()])
    lanes = _lanes(slabs, first.block_size // split // unit_tokens)
    copies: Copies = HostCopies(slabs, split) if device == "cpu" else DeviceCopies(slabs, split)
    return KVCaches(
        tile_format=tile_format,
        kv_dtype=_dtype_name(first, vllm_config.cache_config.cache_dtype),
        block_tokens=first.block_size,
        geometry=Geometry(unit_tokens, lanes),
        num_blocks=kv_cache_config.num_blocks,
        copies=copies,
    )


# --- what vLLM says -----------------------------------------------------------------------------------


def _specs(kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Layer name to spec, in the order of the model. Layers that share another's KV are in no group: skipped."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise LayoutUnsupported(f"a model with {len(groups)} KV cache groups is not supported yet")
    if groups[0].is_eagle_group:
        raise LayoutUnsupported("draft layers of speculative decoding are not supported yet")
    specs = layer_specs(groups[0])
    for spec in specs.values():
        if reason := unsupported_spec(spec):
            raise LayoutUnsupported(reason)
    if missing := [name for name in specs if name not in kv_caches]:
        raise LayoutUnsupported(f"vLLM registered no tensor for layer {missing[0]}")
    if len({(spec.block_size, spec.dtype) for spec in specs.values()}) != 1:
        raise LayoutUnsupported("layers of different block size or dtype are not supported yet")
    return dict(sorted(specs.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Order of layer names: numbers by value, so that all ranks and versions agree on it."""
    return [(1, int(word), "") if word.isdigit() else (0, 0, word) for word in name.split(".")]


def _kernel_blocks_per_block(
    kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, Any], num_blocks: int
) -> int:
    """A kernel may see a block as several smaller ones; they lie side by side."""
    ratios = {divmod(kv_caches[name].shape[0], num_blocks) for name in specs}
    if len(ratios) != 1 or next(iter(ratios))[1] or not next(iter(ratios))[0]:
        raise LayoutUnsupported(f"tensors do not hold the {num_blocks} blocks that vLLM announced")
    return next(iter(ratios))[0]


def _check_backends(specs: Mapping[str, Any], vllm_config: Any) -> None:
    """A shape does not tell what a backend puts into it."""
    for name, spec in specs.items():
        unknown = attention_backends(vllm_config, [name]) - (
            _TOKEN_MAJOR_MLA if is_mla(spec) else _TOKEN_MAJOR
        )
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
        raise LayoutUnsupported(
            "MLA on CPU is not supported: without AMX, prefill after a hit is wrong in vLLM"
        )
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
    """The layer as bytes `[kernel blocks, heads, tile]`, its shape and strides checked."""
    expected = (spec.num_heads, spec.block_size // split, spec.state_content_size_bytes)
    if tensor.dim() != 4:
        raise LayoutUnsupported(f"layer {name} is no [blocks, heads, tokens, content]: {tuple(tensor.shape)}")
    data = tensor.view(torch.uint8)
    if tuple(data.shape[1:]) != expected or spec.block_size % split:
        raise LayoutUnsupported(
            f"layer {name} has {tuple(data.shape[1:])} heads, tokens and bytes, not {expected}"
        )
    blocks, heads, token, byte = data.stride()
    if (token, byte) != (data.shape[3], 1):
        raise LayoutUnsupported(
            f"the tokens of a head are not contiguous in layer {name} (strides in bytes: {data.stride()}); "
            "use the KV cache layout LBHNC: unset VLLM_KV_CACHE_LAYOUT or take another attention backend"
        )
    tile = data.shape[2] * data.shape[3]
    shape, stride = (data.shape[0], data.shape[1], tile), (blocks, heads, 1)
    return torch.as_strided(data, shape, stride, data.storage_offset())


def _slabs(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive layers of one shape at a constant distance, as `[layers, kernel blocks, heads, tile]`."""
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
    for step, count in sorted(zip(stride[:3], shape[:3], strict=True)):
        if count > 1 and step < extent:
            raise LayoutUnsupported(f"tiles overlap (shape {shape}, strides in bytes {stride})")
        extent = max(extent, step * count)
    return torch.as_strided(first, shape, stride, first.storage_offset())


def _lanes(slabs: Sequence[torch.Tensor], units_per_tile: int) -> tuple[LaneGroup, ...]:
    """Slabs of equal shape are one group of lanes."""
    lanes: list[LaneGroup] = []
    for slab in slabs:
        layers, _, heads, tile = slab.shape
        group = LaneGroup(int(layers), int(heads), int(tile) // units_per_tile)
        if lanes and lanes[-1][1:] == group[1:]:
            group = group._replace(num_layers=lanes.pop().num_layers + group.num_layers)
        lanes.append(group)
    return tuple(lanes)


# --- bytes in motion ----------------------------------------------------------------------------------


class HostCopies:
    """Slabs in host memory: numpy moves whole tiles at the speed of memcpy, with one thread and without the GIL
    (torch would start OpenMP threads of its own beside the engine's)."""

    def __init__(self, slabs: Sequence[torch.Tensor], split: int) -> None:
        self._slabs = [slab.numpy() for slab in slabs]
        self._split = split

    def fence(self) -> Fence:
        """None: the engine's work on host memory is done when its call returns."""

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence) -> None:
        """See `Copies`."""
        for slab, tiles in self._views(len(blocks), out):
            for place, block in _kernel_blocks(blocks, self._split):
                tiles[:, :, place] = slab[:, block]

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence) -> None:
        """See `Copies`."""
        for slab, tiles in self._views(len(blocks), data):
            for place, block in _kernel_blocks(blocks, self._split):
                slab[:, block] = tiles[:, :, place]

    def _views(self, num_blocks: int, data: memoryview) -> Iterator[tuple[_Bytes, _Bytes]]:
        """Each slab beside its part of the object, `[layer][head][kernel block][tile]`."""
        flat = np.frombuffer(data, np.uint8)
        offset = 0
        for slab in self._slabs:
            layers, _, heads, tile = slab.shape
            shape = (layers, heads, num_blocks * self._split, tile)
            size = int(np.prod(shape))
            yield slab, flat[offset : offset + size].reshape(shape)
            offset += size


class DeviceCopies:
    """Slabs in device memory: tiles are put together by the device, then cross the bus in one piece per slab.

    Everything happens on a stream of its own, ordered after the fence; only the calling thread waits.
    """

    def __init__(self, slabs: Sequence[torch.Tensor], split: int) -> None:
        # [layer][head][kernel block][tile], as in the object
        self._slabs = [slab.transpose(1, 2) for slab in slabs]
        self._split = split
        self._device = slabs[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fence(self) -> Fence:
        """An event on the calling thread's stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence) -> None:
        """See `Copies`."""
        _, chosen = zip(*_kernel_blocks(blocks, self._split), strict=True)
        flat = torch.frombuffer(out, dtype=torch.uint8)
        with self._ordered(after):
            index = torch.tensor(chosen, device=self._device)
            offset = 0
            for slab in self._slabs:
                tiles = slab.index_select(2, index).view(-1)
                flat[offset : offset + tiles.numel()].copy_(tiles, non_blocking=True)
                offset += tiles.numel()

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence) -> None:
        """See `Copies`."""
        kept = list(_kernel_blocks(blocks, self._split))
        if not kept:
            return
        flat = torch.frombuffer(data, dtype=torch.uint8)
        places, chosen = zip(*kept, strict=True)
        with self._ordered(after):
            source = torch.tensor(places, device=self._device)
            target = torch.tensor(chosen, device=self._device)
            offset = 0
            for slab in self._slabs:
                layers, heads, _, tile = slab.shape
                shape = (layers, heads, len(blocks) * self._split, tile)
                size = layers * heads * shape[2] * tile
                tiles = flat[offset : offset + size].to(self._device, non_blocking=True).view(shape)
                slab.index_copy_(2, target, tiles.index_select(2, source))
                offset += size

    @contextmanager
    def _ordered(self, after: Fence) -> Iterator[None]:
        """Work inside runs after the fence, and is done when this ends."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()


def _kernel_blocks(blocks: Sequence[int | None], split: int) -> Iterator[tuple[int, int]]:
    """(place in the object, kernel block) of every block that is not None."""
    for place, block in enumerate(blocks):
        if block is not None:
            for part in range(split):
                yield place * split + part, block * split + part
