"""Geometry: where the bytes of an object are.

An object is the runs of one chunk, layer-major: `[layer][head][tokens]`. All tokens of a chunk in one
lane (one KV head of one layer) are one run, the unit of checksum and of partition between ranks:

    object:  | layer 0 head 0 | layer 0 head 1 | ... | layer L-1 head H-1 |
    run:     | tile | tile | ... |         a tile is one unit (`unit_tokens` tokens) of one lane

The bytes do not depend on who wrote them: TP takes a range of heads of every layer, PP a range of
layers, and either is a few contiguous spans of the object.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Span(NamedTuple):
    """`size_bytes` bytes from `offset_bytes` on."""

    offset_bytes: int
    size_bytes: int


class Run(NamedTuple):
    """One run of an object: its place in the table, in the object, and its size."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which no run needs
    offset_bytes: int
    size_bytes: int


class LaneGroup(NamedTuple):
    """Consecutive layers of equal shape. `unit_bytes` is one tile: one unit of tokens in one lane."""

    num_layers: int
    num_heads: int
    unit_bytes: int


class Part(NamedTuple):
    """The bytes of an object that one rank writes or reads.

    `spans` are byte ranges of the object, ascending and disjoint; the part's own bytes are their
    concatenation. `runs` are the runs inside, their offsets counted within the part.
    """

    spans: tuple[Span, ...]
    runs: tuple[Run, ...]
    size_bytes: int


class Geometry(NamedTuple):
    """The shape of a namespace's objects.

    Args:
        unit_tokens: tokens in one tile: the engine's block size where a tile cannot be cut, else 1.
        lanes: the layers in order, grouped by equal shape.
    """

    unit_tokens: int
    lanes: tuple[LaneGroup, ...]

    @property
    def num_runs(self) -> int:
        """Runs of any object, which is the number of lanes."""
        return sum(group.num_layers * group.num_heads for group in self.lanes)

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(group.num_layers for group in self.lanes)

    @property
    def bytes_per_unit(self) -> int:
        """Bytes of one unit of tokens over all lanes."""
        return sum(group.num_layers * group.num_heads * group.unit_bytes for group in self.lanes)

    def object_bytes(self, num_tokens: int) -> int:
        """Size of the object that holds `num_tokens` tokens (a multiple of `unit_tokens`)."""
        assert num_tokens > 0 and num_tokens % self.unit_tokens == 0, (
            f"{num_tokens} tokens are not whole units of {self.unit_tokens}"
        )
        return num_tokens // self.unit_tokens * self.bytes_per_unit

    def units_of(self, size_bytes: int) -> int | None:
        """Units of tokens in an object of this size, or None when no object has that size."""
        units, rest = divmod(size_bytes, self.bytes_per_unit)
        return units if units > 0 and rest == 0 else None

    def runs(self, size_bytes: int) -> tuple[Run, ...]:
        """The runs of a whole object of this size, in table order."""
        return self.whole(size_bytes).runs

    def whole(self, size_bytes: int) -> Part:
        """The part that is the whole object."""
        units = self.units_of(size_bytes)
        assert units is not None, f"no object of this namespace has {size_bytes} bytes"
        return _part(self, units, 0, self.num_layers, 0, 1)

    def part(self, num_tokens: int, layers: range, head_shard: int = 0, head_shards: int = 1) -> Part:
        """The part of a rank that owns `layers` (PP) and shard `head_shard` of `head_shards` (TP).

        Where there are fewer heads than shards, heads are replicated as vLLM does it: shard s owns
        head s * heads // shards.
        """
        return _part(self, num_tokens // self.unit_tokens, layers.start, layers.stop, head_shard, head_shards)


@lru_cache(maxsize=256)
def _part(geometry: Geometry, units: int, first: int, last: int, shard: int, shards: int) -> Part:
    spans: list[Span] = []
    runs: list[Run] = []
    size = 0
    for layer, heads, index, offset, run_bytes in _layers(geometry, units):
        if not first <= layer < last:
            continue
        per_shard = max(1, heads // shards)
        head = shard * per_shard if heads >= shards else shard * heads // shards
        span = Span(offset + head * run_bytes, per_shard * run_bytes)
        runs.extend(Run(index + head + n, size + n * run_bytes, run_bytes) for n in range(per_shard))
        if spans and sum(spans[-1]) == span.offset_bytes:
            spans[-1] = Span(spans[-1].offset_bytes, spans[-1].size_bytes + span.size_bytes)
        else:
            spans.append(span)
        size += span.size_bytes
    return Part(tuple(spans), tuple(runs), size)


def _layers(geometry: Geometry, units: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(layer, heads, first run's index, offset in the object, bytes per run) of every layer."""
    layer = index = offset = 0
    for group in geometry.lanes:
        run_bytes = units * group.unit_bytes
        for _ in range(group.num_layers):
            yield layer, group.num_heads, index, offset, run_bytes
            layer += 1
            index += group.num_heads
            offset += group.num_heads * run_bytes


class Extent(NamedTuple):
    """`page_count` adjacent pages from `start_page` on."""

    start_page: int
    page_count: int


Extents = tuple[Extent, ...]
"""Where an object lies in a tier: its bytes fill these pages in order; the last page may be part empty."""


def pages_for(size_bytes: int, page_bytes: int) -> int:
    """Pages that an object of this size takes."""
    return -(-size_bytes // page_bytes)


def locate(extents: Extents, page_bytes: int, spans: tuple[Span, ...]) -> list[Span]:
    """Byte ranges of the tier that hold the object's `spans`, in order.

    The sizes of the result add up to those of `spans`; a span that crosses from one extent to the
    next is cut there.
    """
    placed: list[Span] = []
    for offset, size in spans:
        at, left = offset, size
        base = 0  # object offset at which the extent begins
        for start_page, page_count in extents:
            length = page_count * page_bytes
            if left and base <= at < base + length:
                take = min(left, base + length - at)
                placed.append(Span(start_page * page_bytes + at - base, take))
                at += take
                left -= take
            base += length
        assert left == 0, f"span at {offset} of {size} bytes lies outside its extents"
    return placed
