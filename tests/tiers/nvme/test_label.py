"""The label: two copies, the newer whole one counts; everything that is not ours is refused with a remedy."""

import random
from pathlib import Path
from typing import Any

import pytest

from kvstore.core import BadConfiguration, limits
from kvstore.tiers.nvme.device import BLOCK_BYTES, DeviceRefused
from kvstore.tiers.nvme.label import (
    LABEL_OFFSETS,
    Label,
    decode_label,
    encode_label,
    new_label,
    read_label,
    write_label,
)
from kvstore.tiers.nvme.mounting import mount
from tests.crash.devices import CrashDevice, Power, PowerCut
from tests.tiers.nvme.things import NODE, formatted_image

GOLDEN = Path(__file__).parent / "golden"

LABEL = Label(
    uuid=bytes(range(16)),
    node="node-a",
    epoch=3,
    mount=b"M" * 8,
    created_s=1_796_000_000,
    size_bytes=1 << 30,
    page_bytes=1 << 20,
    page_count=1_018,
    slot_count=1_018,
    records_offset=128 << 10,
    data_offset=5 << 20,
)


def test_golden_bytes_are_what_is_written_and_read() -> None:
    data = bytes.fromhex((GOLDEN / "label.hex").read_text()).ljust(BLOCK_BYTES, b"\0")
    assert encode_label(LABEL) == data
    assert decode_label(data) == LABEL


@pytest.mark.parametrize("size_mib", [10, 64, 1_000, 4_000_000])
@pytest.mark.parametrize("page_bytes", [4_096, 65_536, 1 << 20])
def test_labels_records_and_pages_lie_apart_and_on_the_device(size_mib, page_bytes) -> None:
    label = new_label(size_mib << 20, page_bytes, "n", b"u" * 16, 0)
    records_end = label.records_offset + label.slot_count * BLOCK_BYTES
    assert LABEL_OFFSETS[-1] + BLOCK_BYTES <= label.records_offset
    assert records_end <= label.data_offset < records_end + page_bytes
    data_end = label.data_offset + label.page_count * page_bytes
    assert data_end <= label.size_bytes
    assert label.size_bytes - data_end < 2 * page_bytes + 2 * BLOCK_BYTES, "room is wasted"
    assert label.slot_count > label.page_count


@pytest.mark.parametrize(("size_bytes", "page_bytes"), [(1 << 20, 1 << 20), (1 << 30, 1_000), (1 << 30, 512)])
def test_what_cannot_be_formatted_is_refused(size_bytes, page_bytes) -> None:
    with pytest.raises(BadConfiguration):
        new_label(size_bytes, page_bytes, "n", b"u" * 16, 0)


def device_with(*blocks: bytes) -> CrashDevice:
    image = bytearray(limits.MIB)
    for offset, block in zip(LABEL_OFFSETS, blocks, strict=False):
        image[offset : offset + len(block)] = block
    return CrashDevice(bytes(image), Power())


def test_either_copy_is_enough_and_the_newer_one_counts() -> None:
    old, new = encode_label(LABEL), encode_label(Label(**{**_fields(LABEL), "epoch": 4}))
    broken = bytes([new[0]]) + bytes(new[1:100]) + bytes(BLOCK_BYTES - 100)
    assert read_label(device_with(old, new)).epoch == 4
    assert read_label(device_with(new, old)).epoch == 4
    assert read_label(device_with(broken, old)).epoch == 3
    assert read_label(device_with(old, broken)).epoch == 3


def _fields(label: Label) -> dict[str, Any]:
    return {name: getattr(label, name) for name in label.__struct_fields__}


def test_one_copy_is_whole_at_every_moment_of_a_write() -> None:
    new = Label(**{**_fields(LABEL), "epoch": 4})
    for cut_at in range(4):
        for seed in range(20):
            device = device_with(encode_label(LABEL), encode_label(LABEL))
            device.power = Power(cut_at)
            with pytest.raises(PowerCut):
                write_label(device, new)
            after = CrashDevice(device.after_cut(random.Random(seed)), Power())
            assert read_label(after).epoch in ((3, 4) if cut_at < 2 else (4,))


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((bytes(BLOCK_BYTES), bytes(BLOCK_BYTES)), "is blank"),
        ((b"\x53\xef" * 2_048, bytes(BLOCK_BYTES)), "not ours and is left alone"),
        ((encode_label(LABEL)[:100].ljust(BLOCK_BYTES, b"x"),), "both copies of its label are damaged"),
        ((encode_label(LABEL)[:16] + b"\2\0\0\0" + encode_label(LABEL)[20:],), "format 2"),
        ((encode_label(LABEL)[:16] + b"\0\0\0\0" + encode_label(LABEL)[20:],), "format 0"),
    ],
)
def test_what_is_not_ours_is_refused_untouched_with_a_remedy(blocks, text, tmp_path) -> None:
    device = device_with(*blocks)
    before = bytes(device.live)
    with pytest.raises(DeviceRefused, match=text) as refusal:
        mount(device, NODE, tmp_path)
    assert "kvstore format crash" in str(refusal.value)
    assert bytes(device.live) == before
    assert device.closed


def test_a_device_of_another_node_is_refused_untouched(tmp_path) -> None:
    device = CrashDevice(formatted_image(), Power())
    with pytest.raises(DeviceRefused, match=r"belongs to the node 'node-a', this is 'node-b'"):
        mount(device, "node-b", tmp_path)
    assert bytes(device.live) == formatted_image()
    assert not list(tmp_path.iterdir())
