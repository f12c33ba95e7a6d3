"""Records prove themselves: what was written is read, and nothing else ever is. Golden bytes stay readable."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import Extent, Key, Namespace, limits
from kvstore.tiers.nvme.records import SLOT_BYTES, Kind, Record, decode, encode, slots_claimed, slots_for
from kvstore.wire import Generation

GOLDEN = Path(__file__).parent / "golden"
DEVICE = bytes(range(16))


def record(**changes: object) -> Record:
    values: dict[str, object] = {
        "kind": Kind.OBJECT,
        "key": Key(b"K" * 32),
        "namespace": Namespace(b"N" * 32),
        "parent": Key(b"P" * 32),
        "depth": 5,
        "generation": Generation(b"G" * 8),
        "size_bytes": 12_288,
        "cold": True,
        "sequence": (3 << 40) + 17,
        "slots": Extent(9, 1),
        "extents": (Extent(4, 2), Extent(11, 1)),
    }
    return Record(**values | changes)  # type: ignore[arg-type]


numbers = st.integers(0, 2**64 - 1)
extents = st.lists(st.builds(Extent, numbers, numbers), max_size=limits.EXTENTS_PER_OBJECT_MAX).map(tuple)
bytes_of = st.binary


@st.composite
def records(draw: st.DrawFn) -> tuple[Record, bytes]:
    payload = draw(st.one_of(st.binary(max_size=100), st.just(b"t" * 8_000), st.just(b"m" * 3_904)))
    places = draw(extents)
    written = Record(
        kind=draw(st.sampled_from(Kind)),
        key=Key(draw(st.binary(min_size=32, max_size=32))),
        namespace=Namespace(draw(st.binary(min_size=32, max_size=32))),
        parent=Key(draw(st.binary(min_size=32, max_size=32))),
        depth=draw(numbers),
        generation=Generation(draw(st.binary(min_size=8, max_size=8))),
        size_bytes=draw(numbers),
        cold=draw(st.booleans()),
        sequence=draw(numbers),
        slots=Extent(draw(numbers), slots_for(len(places), len(payload))),
        extents=places,
    )
    return written, payload


@given(records())
def test_what_was_encoded_is_decoded(written) -> None:
    record, payload = written
    data = memoryview(encode(record, payload, DEVICE))
    assert len(data) == record.slots.page_count * SLOT_BYTES
    assert slots_claimed(data[:SLOT_BYTES]) == record.slots.page_count
    assert decode(data, DEVICE, record.slots.start_page) == (record, payload)


@given(records(), st.data())
def test_one_flipped_bit_anywhere_makes_it_none(written, data) -> None:
    """Padding and checksum included. Mutant: a checksum of the used bytes only."""
    record, payload = written
    damaged = bytearray(encode(record, payload, DEVICE))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    assert decode(memoryview(damaged), DEVICE, record.slots.start_page) is None


@given(records())
def test_it_counts_on_its_device_and_in_its_place_only(written) -> None:
    record, payload = written
    data = memoryview(encode(record, payload, DEVICE))
    slot = record.slots.start_page
    assert decode(data, DEVICE[::-1], slot) is None
    assert decode(data, DEVICE, slot ^ 1) is None
    assert decode(data[:-SLOT_BYTES], DEVICE, slot) is None


@pytest.mark.parametrize("payload_bytes", [0, 3_904, 3_905, 8_000])
def test_the_slots_hold_the_record_and_no_more(payload_bytes) -> None:
    """192 bytes of head; a table of 488 runs still fits one slot of an object without extents."""
    slots = slots_for(0, payload_bytes)
    assert (slots - 1) * SLOT_BYTES < 192 + payload_bytes <= slots * SLOT_BYTES


@pytest.mark.parametrize(
    ("name", "expected", "payload"),
    [
        ("record-object", record(), bytes(range(64))),
        (
            "record-namespace",
            record(
                kind=Kind.NAMESPACE,
                key=Key(b"N" * 32),
                parent=Key(bytes(32)),
                depth=0,
                cold=False,
                size_bytes=5_000,
                slots=Extent(9, 2),
                extents=(),
            ),
            b"{}" * 2_500,
        ),
    ],
)
def test_golden_bytes_are_what_is_written_and_read(name, expected, payload) -> None:
    golden = (GOLDEN / f"{name}.hex").read_text()
    data = bytes.fromhex(golden)
    data = data.ljust(expected.slots.page_count * SLOT_BYTES, b"\0")
    assert encode(expected, payload, DEVICE) == data
    assert decode(memoryview(data), DEVICE, 9) == (expected, payload)
