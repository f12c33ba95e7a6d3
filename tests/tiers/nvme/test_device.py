"""The seam to the operating system, on real files; errors that cannot be had for the asking are put in at os.*."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from kvstore.tiers.nvme.device import BLOCK_BYTES, DeviceDown, DeviceRefused, FileDevice, aligned
from kvstore.tiers.nvme.mounting import create_file
from tests.support import wait_until

SIZE_BYTES = 64 * BLOCK_BYTES


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "device")
    create_file(path, SIZE_BYTES)
    return path


@pytest.fixture
def device(path):
    device = FileDevice.open(path)
    yield device
    device.close()


def filled(byte: int, blocks: int = 1) -> memoryview:
    memory = aligned(blocks * BLOCK_BYTES)
    memory[:] = bytes([byte]) * len(memory)
    return memory


def test_buffers_are_one_range_on_the_device(device) -> None:
    device.write(BLOCK_BYTES, [filled(1), filled(2, 2)])
    device.sync()
    whole, rest = aligned(2 * BLOCK_BYTES), aligned(BLOCK_BYTES)
    device.read(BLOCK_BYTES, [whole, rest])
    assert (bytes(whole[:BLOCK_BYTES]), bytes(whole[BLOCK_BYTES:]), bytes(rest)) == (
        bytes(filled(1)),
        bytes(filled(2)),
        bytes(filled(2)),
    )


def test_a_file_is_used_past_the_page_cache_and_has_its_size(device) -> None:
    assert device.size_bytes == SIZE_BYTES
    assert device.warnings == []


def test_where_o_direct_is_impossible_it_is_said_once_and_works(path, monkeypatch) -> None:
    real = os.open

    def without(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", without)
    device = FileDevice.open(path)
    assert len(device.warnings) == 1
    assert "O_DIRECT" in device.warnings[0]
    device.write(0, [filled(7)])
    memory = aligned(BLOCK_BYTES)
    device.read(0, [memory])
    assert memory == filled(7)
    device.close()


def test_a_device_is_used_by_one_process_at_a_time(path, device) -> None:
    code = "import sys; from kvstore.tiers import FileDevice; FileDevice.open(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "DeviceRefused" in other.stderr
    assert "is used by another process" in other.stderr


def test_a_closed_device_is_free_for_others(path, device) -> None:
    device.close()
    FileDevice.open(path).close()


@pytest.mark.parametrize("path", ["/dev/null", "/tmp"])
def test_what_is_no_device_is_refused(path) -> None:
    with pytest.raises(DeviceRefused, match="neither a block device nor a file"):
        FileDevice.open(path)


def test_a_device_that_is_mounted_is_refused(path, monkeypatch) -> None:
    def busy(*_: object) -> int:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "open", busy)
    with pytest.raises(DeviceRefused, match="is in use"):
        FileDevice.open(path)


def test_a_device_that_is_not_there_is_down_not_refused(tmp_path) -> None:
    """An NVMe-oF namespace may be attached later."""
    with pytest.raises(DeviceDown, match="ENOENT"):
        FileDevice.open(str(tmp_path / "nothing"))


def test_a_cut_file_is_a_short_read(path, device) -> None:
    os.truncate(path, 3 * BLOCK_BYTES)
    with pytest.raises(DeviceDown, match=r"read of 8192 bytes at 8192 ended after 4096"):
        device.read(2 * BLOCK_BYTES, [aligned(2 * BLOCK_BYTES)])
    with pytest.raises(DeviceDown, match="ended after 0"):
        device.read(3 * BLOCK_BYTES, [aligned(BLOCK_BYTES)])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODEV, errno.EROFS])
@pytest.mark.parametrize(("call", "name"), [("preadv", "read"), ("pwritev", "write"), ("fdatasync", "sync")])
def test_every_error_is_one_error(device, monkeypatch, code, call, name) -> None:
    hits = []

    def failing(*_: object) -> int:
        hits.append(call)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, failing)
    arguments = () if name == "sync" else (0, [aligned(BLOCK_BYTES)])
    with pytest.raises(DeviceDown, match=errno.errorcode[code]):
        getattr(device, name)(*arguments)
    assert hits == [call]


def test_a_short_write_is_an_error(device, monkeypatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 512)
    with pytest.raises(DeviceDown, match="ended after 512"):
        device.write(0, [filled(1)])


def test_closing_waits_for_nobody_and_the_last_call_closes_the_descriptor(path, monkeypatch) -> None:
    """So a call that hangs never reads through a descriptor that means another file by now."""
    device = FileDevice.open(path)
    entered, goes_on = threading.Event(), threading.Event()
    real = os.preadv

    def hanging(fd: int, *rest) -> int:
        entered.set()
        assert goes_on.wait(10)
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", hanging)
    memory = aligned(BLOCK_BYTES)
    reader = threading.Thread(target=device.read, args=(0, [memory]))
    reader.start()
    assert entered.wait(10)
    device.close()
    with pytest.raises(DeviceDown, match="was closed"):
        device.read(0, [memory])
    monkeypatch.setattr(os, "preadv", real)
    with pytest.raises(DeviceRefused):
        FileDevice.open(path)  # still open, so still locked
    goes_on.set()
    reader.join()

    def free() -> bool:
        try:
            FileDevice.open(path).close()
        except DeviceRefused:
            return False
        return True

    assert wait_until(free)


def test_a_file_is_made_with_all_its_space_and_never_over_another(path, tmp_path) -> None:
    assert os.stat(path).st_blocks * 512 >= SIZE_BYTES
    with pytest.raises(FileExistsError):
        create_file(path, SIZE_BYTES)
    with pytest.raises(DeviceDown, match="no room"):
        create_file(str(tmp_path / "huge"), 1 << 60)
    assert not (tmp_path / "huge").exists()
