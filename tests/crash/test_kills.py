"""Real kills: a process that puts and deletes on real files and real LMDB is killed with SIGKILL, again and again.

Power cuts are tests/tiers/nvme/test_power_cuts.py; here nothing is simulated.
"""

import random
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.tiers import FileDevice, NvmeDevice, aligned, create_file, format_device
from tests.crash.writer import MANIFEST, NODE, OBJECT_BYTES, PAGE_BYTES, config_of, object_bytes
from tests.support import Process, wait_until

CYCLES = 12
SIZE_BYTES = 8 << 20


@dataclass
class Said:
    """What the process said: reported generations by key, and those that may or may not be there."""

    reported: dict[str, str] = field(default_factory=dict)
    in_doubt: set[tuple[str, str]] = field(default_factory=set)
    puts: int = 0

    def hear(self, text: str) -> None:
        for line in text.splitlines():
            match line.split():
                case ["putting", key, generation]:
                    self.in_doubt.add((key, generation))
                case ["put", key, generation]:
                    self.in_doubt.discard((key, generation))
                    self.reported[key] = generation
                    self.puts += 1
                case ["deleting", key, generation]:
                    assert self.reported.pop(key) == generation
                    self.in_doubt.add((key, generation))
                case words:
                    raise AssertionError(f"it said {words}")

    def settle(self, found: dict[str, str]) -> None:
        """What is there now is what there is."""
        assert self.reported.items() <= found.items(), "what was reported is lost"
        assert found.items() - self.reported.items() <= self.in_doubt, (
            "something nobody put, or deleted long ago"
        )
        self.reported = dict(found)
        self.in_doubt = set()


async def contents(path: str, catalogs: Path) -> dict[str, str]:
    """Generations by key; every object's bytes are those of its generation, or it fails."""
    device = NvmeDevice(config_of(path, str(catalogs)))
    await device.start()
    device.audit()
    device.open_namespace(MANIFEST.namespace, MANIFEST.encode())
    memory = aligned(OBJECT_BYTES)
    for record in device.records.values():
        await device.get(record, [memory]).table
        assert bytes(memory) == object_bytes(record.generation)
    found = {record.key.hex(): record.generation.hex() for record in device.records.values()}
    await device.stop()
    return found


def whole_lines(process: Process) -> str:
    """The last line may have been cut by the kill."""
    return process.output().rpartition("\n")[0]


@pytest.mark.process
async def test_what_was_reported_survives_every_kill_and_nothing_else_appears(tmp_path) -> None:
    path = str(tmp_path / "device")
    create_file(path, SIZE_BYTES)
    device = FileDevice.open(path)
    format_device(device, NODE, PAGE_BYTES)
    device.close()
    catalogs = tmp_path / "catalogs"
    rng = random.Random(4)
    said = Said()
    for cycle in range(CYCLES):
        log = tmp_path / f"{cycle}.log"
        arguments = [sys.executable, "-m", "tests.crash.writer", path, str(catalogs), str(cycle)]
        with Process(arguments, log) as process:
            lines = rng.randrange(1, 120)
            wait_until(
                lambda process=process, lines=lines: process.output().count("\nput ") >= lines,  # type: ignore[misc]
                what="the process to put something",
            )
            process.kill()
            said.hear(whole_lines(process))
        if cycle % 4 == 3:
            shutil.rmtree(catalogs)  # the records alone
        said.settle(await contents(path, catalogs))
    assert said.puts > 5 * CYCLES
