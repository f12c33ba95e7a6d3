"""`kvstore scrub`: exactly what is damaged is found, and the exit code says so."""

import time

from kvstore.cli import main
from kvstore.tiers import FileDevice, read_label
from tests.cli.nvme import filled, flip, made
from tests.tiers.nvme.things import CHUNK_BYTES


def test_exactly_the_damaged_objects_are_found(tmp_path, capsys) -> None:
    """A scrub that reads nothing, or that says yes to everything, fails here."""
    disk = made(tmp_path / "disk")
    records = filled(disk, 10)
    device = FileDevice.open(str(disk))
    data_offset = read_label(device).data_offset
    device.close()
    assert main(["scrub", str(disk)]) == 0
    for record in records[2:4]:
        flip(disk, record, data_offset)
    capsys.readouterr()
    assert main(["scrub", str(disk)]) == 1
    said = capsys.readouterr().out
    assert "8 objects are sound, 2 are bad" in said
    for record in records[2:4]:
        assert record.key.hex()[:16] in said
    assert said.count(": bad: ") == 2


def test_bandwidth_is_bounded(tmp_path) -> None:
    disk = made(tmp_path / "disk")
    filled(disk, 5)
    began = time.monotonic()
    assert main(["scrub", str(disk), "--bytes-per-s", str(20 * CHUNK_BYTES)]) == 0
    assert time.monotonic() - began >= 5 / 20


def test_several_devices_and_what_cannot_be_scrubbed(tmp_path, capsys) -> None:
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    filled(two, 1)
    assert main(["scrub", str(one), str(two)]) == 0
    said = capsys.readouterr().out
    assert f"{one}: 0 objects are sound" in said and f"{two}: 1 objects are sound" in said
    node = FileDevice.open(str(two))
    assert main(["scrub", str(two)]) == 2
    node.close()
    assert "is used by another process" in capsys.readouterr().err
    assert main(["scrub", str(tmp_path / "none")]) == 1
    assert main(["scrub", str(one), "--bytes-per-s", "0"]) == 2
