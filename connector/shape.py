"""The KV cache of the unsharded model, put together from what its ranks have, and the part of each rank.

Every worker describes its own tensors: layers by their global names, with the heads it holds. The sum is an
object's lanes, `[layer][head]`, in which neither TP nor PP shows:

    PP   a stage owns consecutive layers, in the order of their names; layers of drafts are behind all others
    TP   rank t of T owns head shard t. With fewer heads than ranks, each head is on T / heads neighbours:
         all of them read it, the first one writes it. MLA is this with one head

What cannot be proven to be such a split is `LayoutUnsupported`. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from connector.metadata import Handshake, Layer, Shape
from kvstore.core import Geometry, KVStoreError, LaneGroup

__all__ = ["LayoutUnsupported", "Whole", "in_order", "lanes_of", "put_together"]


_DRAFT_MODEL = (
    "draft_model."  # where vLLM keeps a draft model; EAGLE and MTP number their layers behind the model's
)
STATE = "state"
"""The tile format of recurrent states."""

CPU_MLA = "cpu-mla"
"""That of MLA on CPU without AMX, where only hits that leave one token are computed right (`whole_asks`)."""


class LayoutUnsupported(KVStoreError):
    """KV of this shape can be neither saved nor loaded. `str()` is a reason, as half a sentence."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What is in the tiles of a model's KV cache, and their shape; `shape.kinds` has that of other kinds."""

    tile_format: str
    kv_dtype: str
    shape: Shape


def put_together(hands: Mapping[tuple[int, int], Handshake], total_heads: int) -> Whole:
    """The whole model's KV cache.

    Args:
        hands: what the ranks say, by (PP rank, TP rank).
        total_heads: KV heads of a layer of the model, as its configuration has them (1 for MLA).

    Raises:
        LayoutUnsupported: the ranks' parts do not add up to one.
    """
    whole = _one_kind(hands, total_heads)
    num_kinds = {len(hand.kinds) for hand in hands.values()}
    if len(num_kinds) != 1:
        raise LayoutUnsupported("the workers have different kinds of KV")
    kinds = []
    for kind in range(num_kinds.pop()):
        parts = {rank: hand.kinds[kind] for rank, hand in hands.items()}
        is_state = next(iter(parts.values())).tile_format == STATE
        # A state is cut by rank in ways of its own: every rank has one, and all of them are those of this TP size.
        kinds.append(_one_kind(parts, whole.shape.tp_size if is_state else total_heads).shape)
    return replace(whole, shape=replace(whole.shape, kinds=tuple(kinds)))


def _one_kind(hands: Mapping[tuple[int, int], Handshake], total_heads: int) -> Whole:
    """The layers of one kind in the whole model."""
    pp_size, tp_size = (max(rank[axis] for rank in hands) + 1 for axis in (0, 1))
    if len(hands) != pp_size * tp_size:
        raise LayoutUnsupported(f"{len(hands)} workers are not {pp_size} stages of {tp_size}")
    formats = {(hand.tile_format, hand.kv_dtype, hand.unit_tokens) for hand in hands.values()}
    if len(formats) != 1:
        raise LayoutUnsupported(f"the workers' KV caches have different formats: {sorted(formats)}")
    [(tile_format, kv_dtype, unit_tokens)] = formats
    stages = [_stage([hands[pp, tp].layers for tp in range(tp_size)]) for pp in range(pp_size)]
    layers = [layer for stage in stages for layer in stage]
    names = [layer.name for layer in layers]
    if names != in_order(names) or len(set(names)) != len(names):
        raise LayoutUnsupported("the pipeline's stages do not hold consecutive layers")
    heads = _heads({layer.num_heads for layer in layers}, tp_size, total_heads)
    lanes = lanes_of([layer._replace(num_heads=heads[layer.num_heads]) for layer in layers])
    firsts = tuple(sum(map(len, stages[:pp])) for pp in range(pp_size + 1))
    return Whole(tile_format, kv_dtype, Shape(Geometry(unit_tokens, lanes), firsts, tp_size))


def _stage(ranks: Sequence[tuple[Layer, ...]]) -> tuple[Layer, ...]:
    """The layers of one pipeline stage, which its tensor parallel ranks hold in equal parts."""
    if len(set(ranks)) != 1 or not ranks[0]:
        raise LayoutUnsupported("the workers of one pipeline stage have different layers, or none")
    return ranks[0]


def _heads(on_a_rank: Collection[int], tp_size: int, total: int) -> dict[int, int]:
    """Heads of a layer by how many of them a rank holds.

    One head on a rank may be one of several, or the same on several ranks: only the configuration tells.
    Layers that differ in heads are unambiguous where every rank has several of each.
    """
    if tp_size == 1:
        return {heads: heads for heads in on_a_rank}
    if len(on_a_rank) > 1 and min(on_a_rank) > 1:
        return {heads: heads * tp_size for heads in on_a_rank}
    split = total % tp_size == 0 or tp_size % total == 0
    if not split or set(on_a_rank) != {max(1, total // tp_size)}:
        raise LayoutUnsupported(
            f"{' or '.join(map(str, sorted(on_a_rank)))} KV heads of a layer on each of {tp_size} ranks "
            f"are not provably the {total} heads of the model"
        )
    return dict.fromkeys(on_a_rank, total)


def lanes_of(layers: Sequence[Layer]) -> tuple[LaneGroup, ...]:
    """Consecutive layers of equal shape are one group of lanes."""
    return tuple(
        LaneGroup(len(list(group)), heads, unit_bytes)
        for (heads, unit_bytes), group in groupby(layers, lambda layer: (layer.num_heads, layer.unit_bytes))
    )


def in_order(names: Collection[str]) -> list[str]:
    """Names of layers in an order that all ranks and versions agree on: by their words, numbers by value."""
    return sorted(names, key=lambda name: (name.startswith(_DRAFT_MODEL), _natural(name)))


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(1, int(word), "") if word.isdigit() else (0, 0, word) for word in name.split(".")]
