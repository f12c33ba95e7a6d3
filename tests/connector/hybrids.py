"""KV caches of models of several kinds, laid out as vLLM lays them out, and a slow oracle of what objects hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from connector.kind_caches import ModelCaches, understand
from tests.connector.caches import full_spec, vllm_config

BLOCK = 32
LAYOUT = KVCacheLayout.LBHNC


def window_spec(
    tokens: int, block_tokens: int = BLOCK, heads: int = 2, head_size: int = 16, **more: Any
) -> Any:
    """A layer that sees a window."""
    values = {"dtype": torch.float32, **more}
    return SlidingWindowSpec(
        block_size=block_tokens, num_kv_heads=heads, head_size=head_size, sliding_window=tokens, **values
    )


def chunked_spec(tokens: int, block_tokens: int = BLOCK, heads: int = 2, head_size: int = 16) -> Any:
    """A layer of local attention."""
    return ChunkedLocalAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=torch.float32,
        attention_chunk_size=tokens,
    )


def state_spec(block_tokens: int = BLOCK, page_bytes: int | None = None, **more: Any) -> Any:
    """A recurrent layer; its page is padded to `page_bytes`."""
    return MambaSpec(
        block_size=block_tokens,
        shapes=((3, 8), (4, 4)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
        page_size_padded=page_bytes,
        **more,
    )


PAGE = full_spec(BLOCK).page_size_bytes

# Layers by number, in groups as vLLM would form them: names interleave, full attention comes last.
GEMMA = (
    ((0, 3), window_spec(64)),
    ((1, 4), window_spec(64)),
    ((2, 5), full_spec(BLOCK)),
)
LLAMA4 = (
    ((0,), chunked_spec(96)),
    ((1,), chunked_spec(96)),
    ((2,), chunked_spec(96)),
    ((3,), full_spec(BLOCK)),
)
QWEN = (((0,), state_spec(page_bytes=PAGE)), ((1,), state_spec(page_bytes=PAGE)), ((2,), full_spec(BLOCK)))


def config_of(groups: Sequence[tuple[Sequence[int], Any]], num_blocks: int) -> KVCacheConfig:
    """Groups over one memory: layers of different groups have the same place, a block belongs to one group."""
    per_group = max(len(numbers) for numbers, _ in groups)
    page = max(spec.page_size_bytes for _, spec in groups)
    size = per_group * page * num_blocks
    tensors, made = [], []
    for numbers, spec in groups:
        names = [f"model.layers.{number}.attn" for number in numbers]
        padded = page if isinstance(spec, MambaSpec) else None
        layer, block, *_ = compute_layout_strides(
            spec, num_blocks, len(names), LAYOUT, fixed_strides=(None, padded, None, None, None)
        )
        tensors.append(KVCacheTensor(size, names, layer, block, 0))
        made.append(KVCacheGroupSpec(names, spec))
    return KVCacheConfig(num_blocks, tensors, made)


@dataclass
class Hybrid:
    """One rank's KV cache of a model of several groups."""

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]

    def understood(self, device: str | None = None) -> ModelCaches:
        """The caches as the connector sees them."""
        found = understand(self.tensors, self.config, vllm_config(), device)
        assert isinstance(found, ModelCaches)
        return found

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, np.uint8)

    @property
    def memory(self) -> Any:
        """All bytes of the cache."""
        storage = next(iter(self.tensors.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def bytes_of(self, names: Sequence[str], blocks: Mapping[str, Sequence[int]]) -> bytes:
        """The object of these layers, lane by lane, each with the blocks of its own."""
        rows = []
        for name in names:
            tensor = self.tensors[name]
            for head in range(tensor.shape[1]):
                rows += [
                    tensor[block, head].contiguous().view(torch.uint8).numpy().tobytes()
                    for block in blocks[name]
                ]
        return b"".join(rows)


def make_hybrid(groups: Sequence[tuple[Sequence[int], Any]], num_blocks: int = 16, seed: int = 1) -> Hybrid:
    """A cache full of random bytes."""
    config = config_of(groups, num_blocks)
    hybrid = Hybrid(config, allocate_kv_cache(config, torch.device("cpu"), LAYOUT, [BLOCK] * len(groups)))
    hybrid.fill(seed)
    return hybrid
