"""The KV cache of a model of several kinds: for each kind, its layers in the order of the model, as lanes of objects.

Layers of one kind may be in several groups of vLLM, each with blocks of its own for the same tokens. So an object is
moved segment by segment: neighbouring layers of one group, whose blocks are the same.

    object of window(64)   | layer 0 | layer 1 | layer 3 | layer 4 |
    group                       1         2         1         2
    blocks of a job        those of group 1 in token order, then those of group 2
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from connector import tensors
from connector.copies import Fence
from connector.kinds import Kind, Reach, kinds_of
from connector.metadata import Handshake
from connector.shape import STATE, LayoutUnsupported, in_order
from connector.tensors import KVCaches, specs_of, understand_layers, understand_states


@dataclass(frozen=True)
class KindCaches:
    """The layers of one kind on one rank.

    Args:
        segments: neighbouring layers of one group, and the place of the group among those of the kind.
        num_groups: of the kind.
    """

    segments: tuple[tuple[int, KVCaches], ...]
    num_groups: int

    @property
    def handshake(self) -> Handshake:
        """What the scheduler half needs for the manifest."""
        layers = tuple(layer for _, caches in self.segments for layer in caches.layers)
        return replace(self.segments[0][1].handshake, layers=layers)

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence = None) -> None:
        """Fills `out` with this rank's part of the object of these blocks, those of each group in turn."""
        at = 0
        for caches, some, size in self._parts(blocks):
            caches.gather(some, out[at : at + size], after)
            at += size
        assert at == len(out), f"{len(out)} bytes are not the object of {len(blocks)} blocks"

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence = None) -> None:
        """Writes this rank's part of an object into these blocks, but not where None stands."""
        at = 0
        for caches, some, size in self._parts(blocks):
            caches.scatter(data[at : at + size], some, after)
            at += size
        assert at == len(data), f"{len(data)} bytes are not the object of {len(blocks)} blocks"

    def _parts(self, blocks: Sequence[Any]) -> list[tuple[KVCaches, Sequence[Any], int]]:
        """Each segment with its blocks, and its bytes in the object."""
        count, rest = divmod(len(blocks), self.num_groups)
        assert rest == 0, f"{len(blocks)} blocks are not the same for each of {self.num_groups} groups"
        return [
            (caches, blocks[place * count : (place + 1) * count], caches.object_bytes(count))
            for place, caches in self.segments
        ]


@dataclass(frozen=True)
class ModelCaches:
    """All kinds of one rank, the full one first."""

    kinds: tuple[KindCaches, ...]

    @property
    def handshake(self) -> Handshake:
        """What the scheduler half needs for the manifest."""
        full, *others = (kind.handshake for kind in self.kinds)
        return replace(full, kinds=tuple(others))

    def of(self, kind: int) -> KindCaches:
        """The layers of this kind."""
        return self.kinds[kind]

    def fence(self) -> Fence:
        """See `Copies.fence`."""
        return self.kinds[0].segments[0][1].fence()


def understand(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, vllm_config: Any, device: str | None = None
) -> KVCaches | ModelCaches:
    """The registered tensors of a model of any number of groups; see `tensors.understand`."""
    if len(kv_cache_config.kv_cache_groups) == 1:
        return tensors.understand(kv_caches, kv_cache_config, vllm_config, device)
    return _by_kind(kv_caches, kv_cache_config, vllm_config, device)


def _by_kind(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, vllm_config: Any, device: str | None
) -> ModelCaches:
    groups = kv_cache_config.kv_cache_groups
    if any(group.is_eagle_group for group in groups):
        raise LayoutUnsupported("draft layers beside several KV cache groups are not supported yet")
    specs = [specs_of(group, kv_caches) for group in groups]
    num_blocks = kv_cache_config.num_blocks

    def segment(kind: Kind, group: int, names: Sequence[str]) -> KVCaches:
        some = {name: specs[group][name] for name in names}
        if kind.reach is Reach.STATE:
            return understand_states(some, kv_caches, num_blocks, device)
        return understand_layers(some, kv_caches, num_blocks, vllm_config, device)

    kinds = []
    for kind in kinds_of(groups):
        group_of = {name: group for group in kind.groups for name in specs[group]}
        runs = groupby(in_order(group_of), group_of.__getitem__)
        segments = tuple(
            (kind.groups.index(group), segment(kind, group, list(names))) for group, names in runs
        )
        kinds.append(KindCaches(segments, len(kind.groups)))
    _check_alike([caches for kind in kinds for _, caches in kind.segments if caches.tile_format != STATE])
    return ModelCaches(tuple(kinds))


def _check_alike(attention: Sequence[KVCaches]) -> None:
    """One word of the manifest is for all of them."""
    formats = {(caches.tile_format, caches.kv_dtype, caches.block_tokens) for caches in attention}
    if len(formats) != 1:
        raise LayoutUnsupported(f"layers whose tiles differ in kind are not supported: {sorted(formats)}")
