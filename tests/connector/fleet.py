"""Engines of any TP and PP on tensors that vLLM's view builder has made, all holding the KV of one prompt.

`Model.kv` is the truth, `[layer][head][token][bytes]`; which lanes a rank has is said here once more, in the words of
vLLM (QKVParallelLinear, get_pp_indices), so that the connector's own arithmetic is not its own judge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from connector.metadata import Rank, Shape
from connector.shape import Whole, put_together
from connector.tensors import KVCaches
from kvstore.core import checksums, select
from tests.connector.caches import Engine, full_spec, make_engine, mla_spec

CHUNK_TOKENS = 128
SPARE_BLOCKS = 3  # nobody's, among those in use


class Split(NamedTuple):
    """An engine's parallelism."""

    tp: int
    pp: int


class Format(NamedTuple):
    """How an engine keeps its KV."""

    device: str = "cuda"
    block_tokens: int = 16
    layout: str = "LBHNC"
    kernel_blocks: int = 1


class Lanes(NamedTuple):
    """One layer: KV heads of the unsharded model, and head size. MLA if there are no heads."""

    heads: int
    head_size: int

    def spec(self, block_tokens: int, heads: int) -> Any:
        """vLLM's description of it on a rank with so many heads."""
        if not self.heads:
            return mla_spec(block_tokens, self.head_size)
        return full_spec(block_tokens, heads, self.head_size)


@dataclass(frozen=True)
class Model:
    """Layers, and the KV of one chunk in each of their lanes."""

    layers: tuple[Lanes, ...]
    seed: int = 1

    @property
    def total_heads(self) -> int:
        """As the model's configuration has them."""
        return self.layers[0].heads or 1

    @cached_property
    def kv(self) -> list[NDArray[np.uint8]]:
        """`[head][token][bytes]` of every layer."""
        random = np.random.default_rng(self.seed)
        shapes = [
            (lanes.heads or 1, CHUNK_TOKENS, lanes.spec(16, 1).state_content_size_bytes)
            for lanes in self.layers
        ]
        return [random.integers(0, 256, shape, np.uint8) for shape in shapes]

    @property
    def object(self) -> bytes:
        """The object: `[layer][head][token]`."""
        return b"".join(layer.tobytes() for layer in self.kv)


@dataclass
class Member:
    """One rank. `heads[i]` are the heads of the whole model that it has of its i-th layer."""

    rank: Rank
    first_layer: int
    heads: list[range]
    engine: Engine
    caches: KVCaches


@dataclass
class Fleet:
    """An engine of TP x PP ranks; the chunk is in `table`, scattered over the pool."""

    model: Model
    split: Split
    format: Format = Format()  # noqa: RUF009 - immutable
    table: list[int] = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = CHUNK_TOKENS // self.format.block_tokens
        order = np.random.default_rng(num_blocks).permutation(num_blocks + SPARE_BLOCKS - 1) + 1
        self.table = [int(block) for block in order[:num_blocks]]
        self.members = [
            self._member(Rank(pp, tp)) for pp in range(self.split.pp) for tp in range(self.split.tp)
        ]

    def _member(self, rank: Rank) -> Member:
        first, stop = stage(len(self.model.layers), self.split.pp, rank.pp)
        mine = self.model.layers[first:stop]
        heads = [heads_of(lanes.heads or 1, rank.tp, self.split.tp) for lanes in mine]
        block_tokens = self.format.block_tokens
        engine = make_engine(
            [lanes.spec(block_tokens, len(some)) for lanes, some in zip(mine, heads, strict=True)],
            len(self.table) + SPARE_BLOCKS,
            self.format.layout,
            self.format.kernel_blocks,
            first_layer=first,
        )
        backend = "FLASH_ATTN" if mine[0].heads else "FLASHMLA"
        return Member(
            rank, first, heads, engine, engine.understood(device=self.format.device, backend=backend)
        )

    @cached_property
    def whole(self) -> Whole:
        """What the scheduler half makes of the ranks' words."""
        hands = {tuple(member.rank): member.caches.handshake for member in self.members}
        return put_together(hands, self.model.total_heads)  # type: ignore[arg-type]

    @property
    def shape(self) -> Shape:
        return self.whole.shape

    # --- the truth ------------------------------------------------------------------------------------

    def fill(self, *, noise: bool = False) -> None:
        """Puts the model's KV into every rank's blocks, and (or only) noise everywhere else."""
        for member in self.members:
            member.engine.fill(seed=17)
            for name, number, heads in self._layers(member):
                if not noise:
                    for place, block in enumerate(self.table):
                        self._blocks(member, name)[block] = self._tokens(number, heads, place)

    def holds(self) -> bool:
        """Whether every rank's blocks hold the model's KV."""
        return all(
            np.array_equal(self._blocks(member, name)[block], self._tokens(number, heads, place))
            for member in self.members
            for name, number, heads in self._layers(member)
            for place, block in enumerate(self.table)
        )

    def others(self) -> list[NDArray[np.uint8]]:
        """The blocks that nobody uses, of every layer and rank."""
        return [
            np.delete(self._blocks(member, name).copy(), self.table, axis=0)
            for member in self.members
            for name, _, _ in self._layers(member)
        ]

    def _layers(self, member: Member) -> list[tuple[str, int, range]]:
        return [
            (f"model.layers.{member.first_layer + n}.attn", member.first_layer + n, heads)
            for n, heads in enumerate(member.heads)
        ]

    def _blocks(self, member: Member, name: str) -> Any:
        """The layer's bytes on this rank, `[block, head, token, bytes]`, however vLLM has laid them out."""
        data = member.engine.tensors[name].view(torch.uint8).numpy()
        if self.format.kernel_blocks == 1:
            return data
        return _Joined(data, self.format.kernel_blocks)

    def _tokens(self, layer: int, heads: range, place: int) -> NDArray[np.uint8]:
        size = self.format.block_tokens
        return self.model.kv[layer][heads.start : heads.stop, place * size : (place + 1) * size]

    # --- what the connector does ----------------------------------------------------------------------

    def push(self) -> tuple[bytes, bytes]:
        """The object and its table, put together from all writers' parts; every byte is written once."""
        size = len(self.model.object)
        data, times = bytearray(size), np.zeros(size, np.uint8)
        runs: dict[int, bytes] = {}
        for member in self.members:
            if not self.shape.writes(member.rank):
                continue
            part = self.shape.part(member.rank, size)
            out = bytearray(part.size_bytes)
            member.caches.gather(self.table, memoryview(out))
            sums = checksums(memoryview(out), part.runs)
            runs |= {run.index: sums[at * 8 : at * 8 + 8] for at, run in enumerate(part.runs)}
            at = 0
            for offset, length in part.spans:
                data[offset : offset + length] = out[at : at + length]
                times[offset : offset + length] += 1
                at += length
        assert (times == 1).all(), "a byte that nobody or more than one has written"
        return bytes(data), b"".join(runs[index] for index in range(len(runs)))

    def pull(self, data: bytes, table: bytes, blocks: Sequence[int | None] | None = None) -> None:
        """Every rank reads its spans, verifies its runs, and fills its blocks."""
        for member in self.members:
            part = self.shape.part(member.rank, len(data))
            mine = bytearray(b"".join(data[offset : offset + length] for offset, length in part.spans))
            assert checksums(memoryview(mine), part.runs) == select(table, part.runs)
            member.caches.scatter(memoryview(mine), self.table if blocks is None else blocks)


class _Joined:
    """Kernel blocks seen as blocks."""

    def __init__(self, data: NDArray[np.uint8], ratio: int) -> None:
        self._data, self._ratio = data, ratio

    def __getitem__(self, block: int) -> NDArray[np.uint8]:
        pieces = self._data[block * self._ratio : (block + 1) * self._ratio]
        return np.concatenate(list(pieces), axis=1)

    def __setitem__(self, block: int, value: NDArray[np.uint8]) -> None:
        for n, piece in enumerate(np.split(value, self._ratio, axis=1)):
            self._data[block * self._ratio + n] = piece

    def copy(self) -> NDArray[np.uint8]:
        return np.stack([self[block] for block in range(len(self._data) // self._ratio)])


def heads_of(total: int, tp_rank: int, tp_size: int) -> range:
    """vLLM: heads are divided if there are enough, else each is on `tp_size / total` neighbouring ranks."""
    if total >= tp_size:
        mine = total // tp_size
        return range(tp_rank * mine, (tp_rank + 1) * mine)
    head = tp_rank // (tp_size // total)
    return range(head, head + 1)


def stage(num_layers: int, pp_size: int, pp_rank: int) -> tuple[int, int]:
    """vLLM: equal stages; what is left over goes to the last stages but the very last."""
    each, rest = divmod(num_layers, pp_size)
    sizes = [each] * pp_size
    for n in range(2, rest + 2):
        sizes[-n] += 1
    first = sum(sizes[:pp_rank])
    return first, first + sizes[pp_rank]
