"""Kinds: KV cache groups of one reach, and what of their KV a hit needs.

vLLM splits the layers of a model into groups only to pack memory; Gemma-3's five window groups are alike. What a
hit that ends at token T needs depends on how far back its layers look, their *reach*:

    full            all tokens before T
    window(w)       the blocks that hold the w - 1 tokens before T
    chunked(c)      the blocks from the last multiple of c on
    state           the one state at T, which the block that ends at T holds

Kind 0 is the full one: its objects are chunks and tails. The others' are *pieces*: of a chunk (or tail), the blocks
that a hit needs that ends with it. A hit that ends later needs no others of that chunk, so those serve it, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from connector.compat import layer_specs, reach_of, state_name


class Reach(StrEnum):
    """How far back a layer looks."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Kind:
    """Groups of one reach.

    Args:
        name: as it stands in the manifest.
        reach: of its layers.
        tokens: of the window, or of a chunk of local attention.
        groups: their numbers in vLLM, ascending.
        block_tokens: tokens of an engine block.
    """

    name: str
    reach: Reach
    tokens: int
    groups: tuple[int, ...]
    block_tokens: int

    def first_token(self, end: int) -> int:
        """The first token that a hit needs that ends at `end`, where a block ends; `end` itself if it needs none."""
        size = self.block_tokens
        match self.reach:
            case Reach.FULL:
                return 0
            case Reach.WINDOW:
                return max(0, end - -(-(self.tokens - 1) // size) * size)
            case Reach.CHUNKED:
                return end // self.tokens * self.tokens // size * size
            case Reach.STATE:
                return end - size

    def object_tokens(self, start: int, stop: int) -> int:
        """Tokens in an object of [start, stop), as geometries count them: a state is one."""
        return 1 if self.reach is Reach.STATE else stop - start

    def tokens_max(self, chunk_tokens: int) -> int:
        """Tokens in the largest object."""
        size = self.block_tokens
        match self.reach:
            case Reach.FULL:
                return chunk_tokens
            case Reach.WINDOW:
                return min(chunk_tokens, -(-(self.tokens - 1) // size) * size)
            case Reach.CHUNKED:
                return min(chunk_tokens, -(-self.tokens // size) * size)
            case Reach.STATE:
                return 1


def kinds_of(groups: Iterable[Any]) -> tuple[Kind, ...]:
    """The kinds of a model whose groups are all understood (`compat.unsupported_engine`), the full one first."""
    found: dict[tuple[Reach, int], list[int]] = {}
    names: dict[tuple[Reach, int], set[str]] = {}
    size = 0
    for number, group in enumerate(groups):
        specs = list(layer_specs(group).values())
        size = specs[0].block_size
        reach, tokens = reach_of(specs[0])
        kind = Reach(reach), tokens
        found.setdefault(kind, []).append(number)
        names.setdefault(kind, set()).update(map(state_name, specs) if reach == Reach.STATE else ())
    return tuple(
        Kind(_name(*kind, size, names[kind]), *kind, tuple(found[kind]), size)
        for kind in sorted(found, key=lambda kind: (kind[0] is not Reach.FULL, kind[0], kind[1]))
    )


def _name(reach: Reach, tokens: int, size: int, states: Iterable[str]) -> str:
    if reach is Reach.STATE:
        return f"state({'; '.join(sorted(states))})"
    if reach is Reach.CHUNKED and tokens % size:
        return f"{reach}({tokens}) in blocks of {size}"  # of which the first begins earlier
    return f"{reach}({tokens})" if tokens else str(reach)
