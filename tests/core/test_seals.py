"""Seals: what stands for a table where whole objects are read."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import checksums, proves, seal, select, table_bytes_of
from kvstore.core.geometry import Geometry, LaneGroup

GEOMETRY = Geometry(1, (LaneGroup(2, 2, 8), LaneGroup(1, 4, 2)))
SIZE = GEOMETRY.object_bytes(5)
WHOLE = GEOMETRY.whole(SIZE)
PARTS = [
    GEOMETRY.part(5, range(2), 0, 1),
    GEOMETRY.part(5, range(3), 1, 2),
    GEOMETRY.part(5, range(3), 3, 4),
]
objects = st.binary(min_size=SIZE, max_size=SIZE)


def flipped(data: bytes, bit: int) -> bytes:
    at, mask = bit // 8 % len(data), 1 << bit % 8
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


@given(objects, st.integers(0))
def test_a_seal_proves_what_its_table_proves_and_nothing_else(data: bytes, bit: int) -> None:
    """Mutants: only the number of runs is compared; the checksums are not read."""
    table = checksums(memoryview(data), WHOLE.runs)
    other = checksums(memoryview(flipped(data, bit)), WHOLE.runs)
    for proof in (table, seal(table)):
        assert proves(proof, table, WHOLE.runs)
        assert not proves(proof, other, WHOLE.runs)
        assert table_bytes_of(proof) == len(table)
    assert not proves(flipped(seal(table), bit), table, WHOLE.runs)


@given(objects)
def test_a_table_proves_parts_and_a_seal_does_not(data: bytes) -> None:
    table = checksums(memoryview(data), WHOLE.runs)
    for part in PARTS:
        found = select(table, part.runs)
        assert proves(table, found, part.runs)
        assert not proves(seal(table), found, part.runs)


@given(st.integers(0, 10_000))
def test_no_seal_can_be_taken_for_a_table(num_runs: int) -> None:
    table = bytes(8 * num_runs)
    assert len(seal(table)) == 12 != len(table)
    assert table_bytes_of(seal(table)) == table_bytes_of(table) == len(table)
