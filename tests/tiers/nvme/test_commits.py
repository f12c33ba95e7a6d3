"""Group commits: the records of one are written with as few I/O as they have places."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.crash.devices import CrashDevice, Power
from tests.tiers.nvme.things import Driver, formatted_image, mounted_on, some_bytes


class Watched(CrashDevice):
    """Notes where each write begins, and how long it is."""

    def __init__(self, image: bytes) -> None:
        super().__init__(image, Power())
        self.writes: list[tuple[int, int]] = []

    def write(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        super().write(offset_bytes, buffers)
        self.writes.append((offset_bytes, sum(map(len, buffers))))


def records_written(device: Watched, driver: Driver, *names: str) -> list[tuple[int, int]]:
    """Puts these in one commit; the first slot of each write to the record region, and how many it covers."""
    written = [driver.write(name, some_bytes(name)) for name in names]
    device.writes.clear()
    driver.commit(written, [])
    label = driver.volume.label
    slot_bytes = label.slot_offset(1) - label.slot_offset(0)
    return sorted(
        ((offset - label.slot_offset(0)) // slot_bytes, size // slot_bytes) for offset, size in device.writes
    )


def test_records_in_adjacent_slots_are_one_write_and_others_are_not(tmp_path: Path) -> None:
    """And all of them are there when the catalog is lost. Mutants: a write for each record; one for all of them, as
    if they lay side by side."""
    device = Watched(formatted_image())
    driver = mounted_on(device, tmp_path / "catalogs")
    assert records_written(device, driver, "a", "b", "c", "d") == [(0, 5)]  # and the manifest
    (gone,) = (record for record in driver.records.values() if record.slots.start_page == 2)
    names = {record.key: name for name, record in zip("abcd", driver.records.values(), strict=True)}
    driver.commit([], [gone])
    assert records_written(device, driver, "e", "f") == [(2, 1), (5, 1)]
    driver.volume.close()
    shutil.rmtree(tmp_path / "catalogs")
    again = mounted_on(CrashDevice(bytes(device.live), Power()), tmp_path / "catalogs", anew=True)
    expected = {some_bytes(name) for name in (*"abcdef",) if name != names[gone.key]}
    assert {again.read(record) for record in again.records.values()} == expected
    again.volume.close()
