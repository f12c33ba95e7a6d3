"""KV caches as vLLM itself would make them, of any layout, and a slow oracle of what objects hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from connector.tensors import KVCaches, understand


class Layers(dict[str, Any]):
    """vLLM's layers by name, all of one attention backend."""

    def __init__(self, backend: str) -> None:
        self._layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))

    def __missing__(self, name: str) -> Any:
        return self._layer


def vllm_config(
    dtype: torch.dtype = torch.float32, cache_dtype: str = "auto", backend: str = "FLASH_ATTN"
) -> Any:
    """As much of vLLM's configuration as the worker half reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context=Layers(backend)),
    )


def full_spec(block_tokens: int = 32, heads: int = 2, head_size: int = 16, **more: Any) -> FullAttentionSpec:
    """An ordinary attention layer."""
    values = {"dtype": torch.float32, **more}
    return FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=head_size, **values)


def mla_spec(block_tokens: int = 16, head_size: int = 24, **more: Any) -> MLAAttentionSpec:
    """A layer with one latent vector per token."""
    values = {"dtype": torch.bfloat16, **more}
    return MLAAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=head_size, **values)


@dataclass
class Engine:
    """One rank's KV cache, filled with random bytes.

    `kernel_blocks` is how many kernel blocks make a block.
    """

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]
    kernel_blocks: int
    block_tokens: int

    def understood(self, device: str | None = None, **config: Any) -> KVCaches:
        """The caches as the connector sees them."""
        return understand(self.tensors, self.config, vllm_config(**config), device)

    def bytes_of(self, blocks: Sequence[int], layers: Sequence[str] | None = None) -> bytes:
        """The object of these blocks, put together token by token: `[layer][head][token]`."""
        size = self.block_tokens // self.kernel_blocks
        rows = []
        for name in layers or list(self.tensors):
            tensor = self.tensors[name]
            for head in range(tensor.shape[1]):
                for block in blocks:
                    for token in range(self.block_tokens):
                        row = tensor[block * self.kernel_blocks + token // size, head, token % size]
                        rows.append(row.contiguous().view(torch.uint8).numpy().tobytes())
        return b"".join(rows)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere. By numpy: torch would wake its threads for it."""
        storage = next(iter(self.tensors.values())).untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        raw[:] = np.random.default_rng(seed).integers(0, 256, raw.shape, np.uint8)


def make_engine(
    specs: Sequence[Any],
    num_blocks: int = 8,
    layout: str = "LBHNC",
    kernel_blocks: int = 1,
    seed: int = 1,
    first_layer: int = 0,
) -> Engine:
    """An engine with a layer per spec: `model.layers.0.attn`, ... Equal neighbours share a tensor of vLLM's."""
    names = [f"model.layers.{first_layer + number}.attn" for number in range(len(specs))]
    config, block_tokens = _config(names, specs, num_blocks, layout), specs[0].block_size
    tensors = allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout[layout], [block_tokens // kernel_blocks]
    )
    engine = Engine(config, tensors, kernel_blocks, block_tokens)
    engine.fill(seed)
    return engine


def _config(names: list[str], specs: Sequence[Any], num_blocks: int, layout: str) -> KVCacheConfig:
    groups: list[tuple[Any, list[str]]] = []
    for name, spec in zip(names, specs, strict=True):
        if groups and groups[-1][0] == spec:
            groups[-1][1].append(name)
        else:
            groups.append((spec, [name]))
    size = sum(spec.page_size_bytes for spec in specs) * num_blocks
    tensors, offset = [], 0
    for spec, members in groups:
        layer, block, *_ = compute_layout_strides(spec, num_blocks, len(members), KVCacheLayout[layout])
        tensors.append(KVCacheTensor(size, members, layer, block, offset))
        offset += spec.page_size_bytes * num_blocks * len(members)
    whole = specs[0] if len(groups) == 1 else _uniform(dict(zip(names, specs, strict=True)))
    return KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(names, whole)])


def _uniform(specs: dict[str, Any]) -> UniformTypeKVCacheSpecs:
    block_tokens = next(iter(specs.values())).block_size
    return UniformTypeKVCacheSpecs(block_size=block_tokens, kv_cache_specs=specs)
