"""The arena: one memory under three names, at an address nobody can guess, that nobody can shrink."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers import Arena

PAGE_BYTES = 4096
NOBODY = 65534


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(5 * PAGE_BYTES, PAGE_BYTES)
    yield made
    made.close()


def test_it_is_zeroed_and_rounded_up_to_whole_pages() -> None:
    arena = Arena.create(2 * PAGE_BYTES + 1, PAGE_BYTES)
    assert (arena.page_count, arena.size_bytes) == (3, 3 * PAGE_BYTES)
    assert bytes(arena.buffer) == bytes(3 * PAGE_BYTES)
    arena.close()


def test_a_view_is_the_buffer_is_the_file(arena: Arena) -> None:
    arena.view(PAGE_BYTES, 4)[:] = b"KVKV"
    assert bytes(arena.buffer[PAGE_BYTES : PAGE_BYTES + 4]) == b"KVKV"
    assert os.pread(arena.fd, 4, PAGE_BYTES) == b"KVKV"
    with mmap.mmap(arena.fd, arena.size_bytes) as other:
        other[0:2] = b"xy"
    assert bytes(arena.view(0, 2)) == b"xy"


def test_a_view_outside_is_our_bug(arena: Arena) -> None:
    assert len(arena.view(0, arena.size_bytes)) == arena.size_bytes
    for offset, size in [(-1, 1), (arena.size_bytes, 1), (0, arena.size_bytes + 1)]:
        with pytest.raises(AssertionError, match="outside the arena"):
            arena.view(offset, size)


def test_addresses_of_an_earlier_arena_are_not_met_again() -> None:
    """With the kernel's own choice a second arena lies where the first one lay."""
    addresses = set()
    for _ in range(8):
        arena = Arena.create(PAGE_BYTES, PAGE_BYTES)
        addresses.add(arena.address)
        arena.close()
    assert len(addresses) == 8


def test_it_is_mapped_where_it_says(arena: Arena) -> None:
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in lines if "kvstore-arena" in line]
    assert [int(line.split("-")[0], 16) for line in mapped].count(arena.address) == 1


def test_nobody_can_shrink_it(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE_BYTES)


def resident_bytes(arena: Arena) -> int:
    """Of the arena's mapping, as the kernel counts it."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{arena.address:x}-"):
            return next(int(entry.split()[1]) << 10 for entry in lines if entry.startswith("Rss:"))
    return 0


def test_every_page_is_there_from_the_start() -> None:
    """More than one slice, so that every thread's share is seen."""
    arena = Arena.create(130 << 20, 1 << 20, lock=False)
    assert resident_bytes(arena) == arena.size_bytes
    arena.close()


def said_by_a_child(limit: str) -> str:
    """What an unprivileged process under a resource limit says when it creates an arena of 64 MiB."""
    code = f"""
import os, resource
from kvstore.core import BadConfiguration
from kvstore.tiers import Arena
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit({limit})
if os.getuid() == 0:
    os.setuid({NOBODY})
try:
    print("created", *Arena.create(64 << 20).warnings)
except BadConfiguration as error:
    print("refused", error)
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def test_what_cannot_be_locked_is_said_with_the_limit_that_is_missing() -> None:
    said = said_by_a_child("resource.RLIMIT_MEMLOCK, (65536, 65536)")
    assert said.startswith("created the arena of 64 MiB is not locked in memory")
    assert "the limit is 64 KiB" in said
    assert "`ulimit -l 65536`" in said


def test_what_can_be_locked_needs_no_words(arena: Arena) -> None:
    assert arena.warnings == []


def test_no_memory_is_one_line_that_says_what_to_do() -> None:
    said = said_by_a_child("resource.RLIMIT_AS, (mapped + (32 << 20), -1)")
    assert said.startswith(
        "refused there is no memory for an arena of 64 MiB (Cannot allocate memory): make it smaller"
    )


def test_a_kernel_that_cannot_prefault_is_served_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14 the advice is unknown."""
    monkeypatch.setattr("kvstore.tiers.arena._MADV_POPULATE_WRITE", 9999)
    arena = Arena.create(2 << 20, lock=False)
    assert resident_bytes(arena) == arena.size_bytes
    arena.close()
