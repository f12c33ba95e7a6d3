"""Lookup and load masks of models of several kinds, against vLLM's own coordinator of external hits as the oracle.

Mutants that must fail here: a window that is a block too short; a chunk of local attention that begins at the block
behind its multiple; a state taken for present because its chunk is; the smallest boundary instead of the largest.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from connector.boundaries import longest_hit, needed, with_pieces, worth_saving
from connector.keys import Link
from connector.kinds import Kind, Reach, kinds_of
from kvstore.core import Key, chunk_key

SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def full(block: int) -> Any:
    return FullAttentionSpec(block_size=block, **SHAPE)


def window(block: int, tokens: int) -> Any:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **SHAPE)


def chunked(block: int, tokens: int) -> Any:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **SHAPE)


def state(block: int) -> Any:
    return MambaSpec(
        block_size=block,
        shapes=((3, 8), (4, 4)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
    )


def groups_of(specs: Sequence[Any]) -> list[Any]:
    return [KVCacheGroupSpec([f"layers.{number}.attn"], spec) for number, spec in enumerate(specs)]


def chain(num_tokens: int, chunk: int, block: int) -> list[Link]:
    """Links of a prompt of which the last token is left out."""
    links: list[Link] = []
    parent = Key(bytes(32))
    usable = num_tokens - 1
    ends = [*range(chunk, usable + 1, chunk)]
    if usable // block * block > usable // chunk * chunk:
        ends.append(usable // block * block)
    start = 0
    for depth, stop in enumerate(ends):
        key = chunk_key(parent, range(start, stop))
        links.append(Link(key, parent, depth, start, stop, stop - start < chunk))
        parent, start = key, stop
    return links


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Any], int, int]:
    """Groups of a model (several of one spec, in any order), block and chunk size."""
    block = draw(st.sampled_from([4, 8, 16]))
    local = draw(st.lists(st.integers(2, 12).map(lambda blocks: blocks * 3), max_size=1))
    chunk = block * draw(st.integers(1, 4))
    windows = draw(
        st.lists(
            st.one_of(
                st.sampled_from([2, block, block + 1, block + 2, chunk, 2 * chunk + 1]), st.integers(2, 60)
            ),
            max_size=2,
        )
    )
    specs = [
        full(block),
        *(window(block, tokens) for tokens in windows),
        *(chunked(block, max(c, 1)) for c in local),
    ]
    specs += [state(block)] * draw(st.integers(0, 1))
    specs += draw(st.lists(st.sampled_from(specs), max_size=3))
    return draw(st.permutations(specs)), block, chunk


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[list[Any], int, tuple[Link, ...], tuple[Kind, ...], frozenset[Key]]:
    """A model's groups and block size, a prompt, and what of it is stored: most of it."""
    specs, block, chunk = draw(models())
    kinds = kinds_of(groups_of(specs))
    num_tokens = draw(st.integers(1, 9 * chunk))
    links = with_pieces(chain(num_tokens, chunk, block), kinds)
    keys = [key for link in links for key in (link.key, *(piece.key for piece in link.pieces))]
    missing = (
        draw(st.sets(st.sampled_from(keys), max_size=draw(st.sampled_from([1, 3, 12])))) if keys else set()
    )
    return specs, block, links, kinds, frozenset(keys) - missing


def oracle_of(specs: Sequence[Any], block: int) -> MooncakeStoreCoordinator:
    """Its hits end at blocks."""
    return MooncakeStoreCoordinator(groups_of(specs), block, block)


def hit_by_vllm(situation: Any, exists: set[tuple[int, bytes]]) -> int:
    """Where the longest hit ends: the last of our boundaries at which vLLM's own ends, too."""
    specs, block, links, _, _ = situation
    hashes, pool = hashes_of(links, block), ExternalCachedBlockPool(block, exists)
    oracle = oracle_of(specs, block)
    ends = (link.stop for link in reversed(links))
    return next((end for end in ends if oracle.find_longest_cache_hit(hashes, end, pool)[1] == end), 0)


def hashes_of(links: Sequence[Link], block: int) -> list[Any]:
    return [number.to_bytes(32, "big") for number in range((links[-1].stop if links else 0) // block)]


@given(situations())
def test_a_hit_is_as_long_as_vllm_itself_would_have_it(situation: Any) -> None:
    _, block, links, kinds, present = situation
    exists = {
        (group, hashes_of(links, block)[at // block])
        for link in links
        for one in (link, *link.pieces)
        if one.key in present
        for group in kinds[one.kind].groups
        for at in range(one.start, one.stop, block)
    }
    length = longest_hit(links, kinds, present.__contains__)
    assert (links[length - 1].stop if length else 0) == hit_by_vllm(situation, exists)


@given(situations(), st.data())
def test_what_a_hit_needs_is_what_vllm_would_load(situation: Any, data: st.DataObject) -> None:
    specs, block, links, kinds, _ = situation
    assume(links)
    last = data.draw(st.integers(0, len(links) - 1))
    stop = links[last].stop
    masks = oracle_of(specs, block).load_mask(hashes_of(links, block), stop)
    pieces = [*links[: last + 1], *needed(links, last, kinds)]
    for kind in kinds:
        blocks = {
            at // block
            for piece in pieces
            if kinds[piece.kind] is kind
            for at in range(max(piece.start, kind.first_token(stop)), piece.stop, block)
        }
        for group in kind.groups:
            assert {number for number, wanted in enumerate(masks[group]) if wanted} == blocks, kind.name


@given(situations(), st.data())
def test_a_local_hit_takes_away_what_it_brings(situation: Any, data: st.DataObject) -> None:
    _, block, links, kinds, present = situation
    assume(links)
    computed = data.draw(st.integers(0, links[-1].stop // block)) * block
    length = longest_hit(links, kinds, present.__contains__, computed)
    if length:
        assert links[length - 1].stop > computed
        for piece in needed(links, length - 1, kinds, computed):
            assert piece.key in present
            assert piece.stop > computed
    assert length >= longest_hit(links, kinds, present.__contains__) or not length or computed == 0
    state_pieces = [
        piece
        for last, link in enumerate(links)
        if link.stop > computed
        for piece in needed(links, last, kinds, computed)
        if kinds[piece.kind].reach is Reach.STATE and piece.stop == link.stop
    ]
    stateful = any(kind.reach is Reach.STATE for kind in kinds)
    assert len(state_pieces) == (sum(link.stop > computed for link in links) if stateful else 0)


@pytest.mark.parametrize("retention", [0, 16, 32, 40, 64])
@given(num_tokens=st.integers(1, 200), tokens=st.integers(2, 80))
def test_what_is_saved_serves_the_same_prompt_and_those_that_go_on(
    retention: int, num_tokens: int, tokens: int
) -> None:
    """Of a window, as much as hits at the tail, at the last chunk, and at one chunk in `retention` tokens need."""
    block, chunk = 4, 16
    kinds = kinds_of(groups_of([full(block), window(block, tokens), state(block)]))
    links = with_pieces(chain(num_tokens, chunk, block), kinds)
    saved = worth_saving(links, kinds, retention)
    held = saved | {link.key for link in links} | {link.pieces[0].key for link in links}
    hits = [
        links[length - 1].stop
        for length in range(1, len(links) + 1)
        if longest_hit(links[:length], kinds, held.__contains__) == length
    ]
    ends = [link.stop for link in links]
    expected = {
        end
        for link, end in zip(links, ends, strict=True)
        if retention and link.start // retention < end // retention
    }
    expected |= {*ends[-1:], *[end for end in ends if end % chunk == 0][-1:]}
    assert expected <= set(hits)
    if tokens == 2 and retention == 0:
        assert len(saved) <= 2
    assert not any(link.pieces[0].key in saved for link in links), "states are saved when vLLM offers them"


def test_groups_of_one_reach_are_one_kind() -> None:
    specs = [window(4, 8), full(4), window(4, 8), state(4), chunked(4, 32), window(4, 16), state(4), full(4)]
    kinds = kinds_of(groups_of(specs))
    assert [(kind.reach, kind.tokens, kind.groups) for kind in kinds] == [
        (Reach.FULL, 0, (1, 7)),
        (Reach.CHUNKED, 32, (4,)),
        (Reach.STATE, 0, (3, 6)),
        (Reach.WINDOW, 8, (0, 2)),
        (Reach.WINDOW, 16, (5,)),
    ]
    assert [kind.name for kind in kinds if kind.reach is not Reach.STATE] == [
        "full",
        "chunked(32)",
        "window(8)",
        "window(16)",
    ]
    assert "float32[3,8] float32[4,4]" in kinds[2].name


def test_keys_of_pieces_differ_by_kind_and_by_end() -> None:
    kinds = kinds_of(groups_of([full(4), window(4, 8), state(4)]))
    links = with_pieces(chain(100, 16, 4), kinds)
    keys = [key for link in links for key in (link.key, *(piece.key for piece in link.pieces))]
    assert len(set(keys)) == len(keys) == 3 * len(links)
    for link in links:
        assert all(piece.parent == link.key and piece.depth == link.depth + 1 for piece in link.pieces)
