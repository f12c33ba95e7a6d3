"""Any prefill feeds any decode: TP, PP, block size and layout of writer and reader are independent.

Mutants that were tried and are caught: the wrong stride (heads for tokens in token-major layouts, kernel blocks for
blocks); two heads swapped; layers shifted by a stage; every replica writes, and the last one; a reader's head shard
by remainder instead of neighbours; stages in the order of their names as text.
"""

from dataclasses import replace
from functools import cache
from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.metadata import Handshake, Layer, Rank
from connector.shape import LayoutUnsupported, put_together
from kvstore.core import Geometry, LaneGroup
from tests.connector.fleet import Fleet, Format, Lanes, Model, Split

SPLITS = [Split(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]
BLOCKS = [16, 32, 128]
GPU_LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"]
GPU = [Format("cuda", size, layout) for size, layout in product(BLOCKS, GPU_LAYOUTS)] + [
    Format("cuda", 32, "LBHNC", 2),
    Format("cuda", 128, "LBNHC", 4),
]
MODELS = {"gqa": Model((Lanes(4, 8),) * 4), "mla": Model((Lanes(0, 24),) * 4)}
GQA = MODELS["gqa"]
LAPS = 3


@cache
def fleet(kind: str, split: Split, form: Format) -> Fleet:
    return Fleet(MODELS[kind], split, form)


@cache
def pushed(kind: str, split: Split, form: Format) -> tuple[bytes, bytes]:
    writer = fleet(kind, split, form)
    writer.fill()
    return writer.push()


def play(kind: str, writer: tuple[Split, Format], reader: tuple[Split, Format]) -> None:
    """What one engine writes, the other reads, lane by lane, and nothing else changes there."""
    data, table = pushed(kind, *writer)
    assert data == MODELS[kind].object
    target = fleet(kind, *reader)
    assert target.whole.shape.geometry == fleet(kind, *writer).whole.shape.geometry
    target.fill(noise=True)
    before = target.others()
    assert not target.holds()
    target.pull(data, table)
    assert target.holds()
    assert all(map(np.array_equal, before, target.others()))


@pytest.mark.parametrize("writer", SPLITS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_any_split_feeds_any_other(kind: str, writer: Split) -> None:
    """Every pair of splits, with formats by turns so that over all pairs each format meets each other one."""
    laps = LAPS if kind == "gqa" else 1  # one head is split in fewer ways
    offset = SPLITS.index(writer) * len(SPLITS)
    pairs = list(product(GPU, GPU))
    for number, reader in enumerate(SPLITS):
        for lap in range(laps):
            forms = pairs[(offset + number + lap * len(SPLITS) ** 2) % len(pairs)]
            play(kind, (writer, forms[0]), (reader, forms[1]))


def test_the_turns_reach_every_pair_of_formats() -> None:
    assert len(GPU) ** 2 <= LAPS * len(SPLITS) ** 2


@pytest.mark.parametrize("block_tokens", BLOCKS)
def test_on_cpu_any_split_feeds_any_other_of_the_same_block_size(block_tokens: int) -> None:
    form = Format("cpu", block_tokens)
    for writer, reader in product(SPLITS, SPLITS):
        play("gqa", (writer, form), (reader, form))


def test_on_cpu_the_block_size_is_part_of_the_format() -> None:
    """A mismatch is another namespace, not other bytes in the same one."""
    geometries = {fleet("gqa", Split(1, 1), Format("cpu", size)).shape.geometry for size in BLOCKS}
    assert len(geometries) == len(BLOCKS)
    assert {geometry.unit_tokens for geometry in geometries} == set(BLOCKS)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Fleet, Fleet]:
    """Two engines of one model, drawn: splits that vLLM allows, formats, layers of unequal shape."""
    heads = draw(st.sampled_from([0, 1, 2, 3, 4, 6]))
    num_layers = draw(st.integers(1, 12))
    sizes = [draw(st.sampled_from([16, 48]))] * num_layers
    if heads and draw(st.booleans()):
        sizes = [draw(st.sampled_from([16, 48])) for _ in range(num_layers)]
    device = draw(st.sampled_from(["cuda", "cpu"])) if heads else "cuda"
    block = draw(st.sampled_from(BLOCKS))
    made = []
    model = Model(tuple(Lanes(heads, size) for size in sizes), draw(st.integers(0, 9)))
    for _ in range(2):
        tp = draw(st.sampled_from([t for t in range(1, 9) if not (heads or 1) % t or not t % (heads or 1)]))
        split = Split(tp, draw(st.integers(1, min(4, num_layers))))
        if device == "cpu":
            made.append(Fleet(model, split, Format("cpu", block)))
        else:
            layout = draw(st.sampled_from(["LBHNC"] if len(set(sizes)) > 1 else GPU_LAYOUTS))
            made.append(Fleet(model, split, Format("cuda", draw(st.sampled_from(BLOCKS)), layout)))
    return made[0], made[1]


@settings(max_examples=30)
@given(fleets())
def test_whatever_the_geometry_bytes_read_are_bytes_written(pair: tuple[Fleet, Fleet]) -> None:
    writer, reader = pair
    assert writer.whole.shape.geometry == reader.whole.shape.geometry
    writer.fill()
    data, table = writer.push()
    assert data == writer.model.object
    reader.fill(noise=True)
    reader.pull(data, table)
    assert reader.holds()


# --- these tests can fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["swapped heads", "shifted layers", "wrong stride"])
def test_a_rank_that_errs_about_its_lanes_is_noticed(damage: str) -> None:
    """The judge is not the arithmetic of the connector."""
    writer = Fleet(GQA, Split(2, 2))
    writer.fill()
    member = writer.members[0]
    names = list(member.engine.tensors)
    if damage == "swapped heads":
        for name in names:
            member.engine.tensors[name].copy_(member.engine.tensors[name].flip(1).clone())
    elif damage == "shifted layers":
        layers = [member.engine.tensors[name].clone() for name in names]
        for name, other in zip(names, cycle(layers[1:] + layers[:1]), strict=False):
            member.engine.tensors[name].copy_(other)
    else:
        for name in names:
            tensor = member.engine.tensors[name]
            tensor.copy_(tensor.transpose(1, 2).reshape(tensor.shape).clone())
    data, _ = writer.push()
    assert data != GQA.object


# --- what the ranks say, put together -------------------------------------------------------------------


def hand(first: int, *heads: int, unit_bytes: int = 64, form: str = "gpu-kv") -> Handshake:
    layers = tuple(Layer(f"model.layers.{first + n}.attn", some, unit_bytes) for n, some in enumerate(heads))
    return Handshake(form, "bfloat16", 1, layers)


def test_neither_tp_nor_pp_shows_in_the_geometry() -> None:
    wanted = Geometry(1, (LaneGroup(12, 4, 64),))
    for tp, pp in ((1, 1), (2, 3), (4, 2), (8, 4), (16, 1)):
        each = 12 // pp
        hands = {(p, t): hand(p * each, *[max(1, 4 // tp)] * each) for p, t in product(range(pp), range(tp))}
        shape = put_together(hands, 4).shape
        assert shape.geometry == wanted
        assert shape.firsts == tuple(range(0, 13, each))


def test_one_of_each_group_of_replicas_writes() -> None:
    shape = put_together({(0, t): hand(0, 1) for t in range(8)}, 4).shape
    assert [shape.writes(Rank(0, t)) for t in range(8)] == [True, False] * 4
    assert [shape.part(Rank(0, t), 256).spans[0].offset_bytes for t in range(8)] == [
        0, 0, 64, 64, 128, 128, 192, 192
    ]  # fmt: skip
    latent = put_together({(0, t): hand(0, 1) for t in range(4)}, 1).shape
    assert [latent.writes(Rank(0, t)) for t in range(4)] == [True, False, False, False]


def test_layers_of_unequal_heads_are_split_where_that_is_unambiguous() -> None:
    even = put_together({(0, t): hand(0, 2, 4, 2) for t in range(2)}, 4)
    assert even.shape.geometry.lanes == (LaneGroup(1, 4, 64), LaneGroup(1, 8, 64), LaneGroup(1, 4, 64))
    alone = put_together({(0, 0): hand(0, 1, 2)}, 2)
    assert alone.shape.geometry.lanes == (LaneGroup(1, 1, 64), LaneGroup(1, 2, 64))


STAGE = {(0, 0): hand(0, 2, 2), (0, 1): hand(0, 2, 2)}


@pytest.mark.parametrize(
    ("hands", "reason"),
    [
        ({(0, t): hand(0, 1, 2) for t in range(2)}, "1 or 2 KV heads of a layer on each of 2 ranks"),
        ({(0, t): hand(0, 1) for t in range(3)}, "are not provably the 4 heads"),
        ({(0, t): hand(0, 4) for t in range(2)}, "4 KV heads of a layer on each of 2 ranks"),
        ({**STAGE, (0, 1): hand(0, 2)}, "different layers"),
        ({**STAGE, (0, 1): hand(0, 2, 2, unit_bytes=32)}, "different layers"),
        ({**STAGE, (0, 1): hand(0, 2, 2, form="gpu-mla")}, "different formats"),
        ({**STAGE, (1, 0): hand(2, 2)}, "3 workers are not 2 stages of 2"),
        ({(0, 0): hand(2, 4), (1, 0): hand(0, 4, 4)}, "consecutive layers"),
        ({(0, 0): hand(0, 4, 4), (1, 0): hand(1, 4)}, "consecutive layers"),
        ({(0, 0): hand(0, 4), (1, 0): hand(0)}, "or none"),
    ],
)
def test_what_does_not_add_up_is_refused(hands: dict[tuple[int, int], Handshake], reason: str) -> None:
    with pytest.raises(LayoutUnsupported, match=reason):
        put_together(hands, 4)


def test_isa_is_part_of_what_must_agree() -> None:
    """Workers on hosts of different instruction sets: no object could hold both."""
    hands = {(0, 0): hand(0, 2), (0, 1): replace(hand(0, 2), tile_format="cpu-amx")}
    with pytest.raises(LayoutUnsupported, match="different formats"):
        put_together(hands, 4)
