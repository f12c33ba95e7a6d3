"""Manifests with several kinds of objects, and how a node tells the runs of one that says nothing of its kind."""

import json

import msgspec
import pytest

from kvstore.core import BadRequest, Kind, Manifest, decode_manifest

FULL = Manifest(
    weights="w",
    model={},
    kv_dtype="float32",
    tile_format="t",
    chunk_tokens=256,
    unit_tokens=128,
    lanes=((2, 2, 64),),
)  # 4 runs
WINDOW = Kind(name="window(129)", tokens=128, unit_tokens=128, lanes=((5, 2, 64),))  # 10 runs
STATE = Kind(name="state", tokens=1, unit_tokens=1, lanes=((3, 1, 1000),))  # 3 runs
HYBRID = msgspec.structs.replace(FULL, kinds=(WINDOW, STATE))


def test_a_model_of_one_kind_has_the_manifest_that_it_always_had() -> None:
    assert "kinds" not in json.loads(FULL.encode())
    assert decode_manifest(FULL.encode()) == FULL


def test_kinds_are_part_of_the_namespace_and_survive_the_wire() -> None:
    assert decode_manifest(HYBRID.encode()) == HYBRID
    other = msgspec.structs.replace(
        HYBRID, kinds=(WINDOW, msgspec.structs.replace(STATE, name="state of TP2"))
    )
    assert len({FULL.namespace, HYBRID.namespace, other.namespace}) == 3


@pytest.mark.parametrize(("size", "num_runs"), [(512, 4), (256, 4), (640, 10), (3000, 3)])
def test_size_and_table_tell_the_runs(size: int, num_runs: int) -> None:
    kinds = HYBRID.object_kinds
    assert kinds.allow(size)
    part = kinds.whole(size, 8 * num_runs)
    assert len(part.runs) == num_runs
    assert sum(run.size_bytes for run in part.runs) == size == part.size_bytes


@pytest.mark.parametrize(
    ("size", "num_runs"), [(512, 10), (512, 3), (1280, 10), (2048, 4), (3000, 4), (6000, 3), (1, 4)]
)
def test_what_no_kind_has_is_nobodys(size: int, num_runs: int) -> None:
    assert HYBRID.object_kinds.geometry_of(size, 8 * num_runs) is None


def test_the_largest_object_may_be_of_any_kind() -> None:
    assert FULL.object_kinds.largest_bytes == 512
    assert HYBRID.object_kinds.largest_bytes == 3000


def test_kinds_whose_runs_cannot_be_told_apart_are_refused() -> None:
    """Mutant: a node that verifies with the runs of another kind drops good copies."""
    uneven = Kind(name="window(129)", tokens=128, unit_tokens=128, lanes=((1, 2, 64), (1, 2, 32)))
    with pytest.raises(BadRequest, match="equally many runs"):
        decode_manifest(msgspec.structs.replace(FULL, kinds=(uneven,)).encode())
    even = Kind(name="window(129)", tokens=128, unit_tokens=128, lanes=((2, 2, 64),))
    decode_manifest(msgspec.structs.replace(FULL, kinds=(even,)).encode())


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": 100},
        {"tokens": 0},
        {"lanes": ()},
        {"lanes": ((1, 0, 64),)},
        {"lanes": ((70_000, 1, 64),)},
    ],
)
def test_an_impossible_kind_is_refused_by_name(bad: dict[str, object]) -> None:
    broken = msgspec.structs.replace(FULL, kinds=(msgspec.structs.replace(WINDOW, **bad),))
    with pytest.raises(BadRequest, match=r"window\(129\)|tokens"):
        decode_manifest(broken.encode())
