"""Devices in the configuration: several tables of one section, what is refused, and files that are made."""

import os
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.core import BadConfiguration, KVStoreError, limits
from kvstore.node import load_config
from kvstore.node.devices import make_tier
from kvstore.tiers import DeviceRefused, FileDevice, read_label

BASE = {"node.id": "n1", "dram.size_bytes": "64MiB"}


def loaded(folder: Path, text: str = "", environment=None, **flags: object):
    file = folder / "kvstore.toml"
    file.write_text(text)
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return load_config({**BASE, **given}, environment or {}, str(file))


def refusal(folder: Path, text: str = "", environment=None, **flags: object) -> str:
    with pytest.raises(BadConfiguration) as refused:
        loaded(folder, text, environment, **flags)
    assert "\n" not in str(refused.value)
    return str(refused.value)


TWO = """[[nvme]]
path = "/dev/nvme7n1"

[[nvme]]
path = "{folder}/second"
size_bytes = "32MiB"
threads = 8
deadline_s = 2
"""


def test_each_table_is_a_device(tmp_path) -> None:
    text = TWO.format(folder=tmp_path)
    config, origins = loaded(tmp_path, text)
    first, second = config.nvme
    assert (first.path, first.threads, first.size_bytes) == ("/dev/nvme7n1", limits.NVME_THREADS_DEFAULT, 0)
    assert (second.threads, second.deadline_s, second.size_bytes) == (8, 2.0, 32 * limits.MIB)
    assert (first.catalog_folder, second.catalog_folder) == ("/var/lib/kvstore", f"{tmp_path}/second.catalog")
    assert origins["nvme.path"] == f"{tmp_path}/kvstore.toml:2"
    assert origins["nvme[1].threads"] == f"{tmp_path}/kvstore.toml:7"
    assert config.tiers.spill == "evict"


def test_flags_and_variables_describe_the_only_device(tmp_path) -> None:
    environment = {"KVSTORE_NVME_PATH": f"{tmp_path}/e", "KVSTORE_NVME_SIZE_BYTES": "1GiB"}
    (device,) = loaded(tmp_path, "", environment).config.nvme
    assert (device.path, device.size_bytes) == (f"{tmp_path}/e", limits.GIB)
    text = '[[nvme]]\npath = "/dev/nvme7n1"\nthreads = 8\n'
    (device,) = loaded(tmp_path, text, nvme__deadline_s=1.0, nvme__path="/dev/nvme8n1").config.nvme
    assert (device.path, device.threads, device.deadline_s) == ("/dev/nvme8n1", 8, 1.0)
    assert loaded(tmp_path).config.nvme == ()


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("[[nvme]]\nthreads = 4\n", {}, [":1: a device needs a path"]),
        ('[[nvme]]\npath = "/dev/a"\n[[nvme]]\nthread = 4\n', {}, [":4: unknown key 'thread'", "'threads'"]),
        ('[[nvme]]\npath = "/dev/a"\n[[nvme]]\n', {}, [":3: a device needs a path"]),
        ('[nvme]\npath = "/dev/a"\n', {}, [":1: the section is written [[nvme]]"]),
        ('[[dram]]\nlock = true\n', {}, [":1: the section is written [dram]"]),
        ('[[nvme]]\npath = "/dev/a"\nthreads = 1\n', {}, [":3: nvme.threads must be a whole number from 2 to 64"]),
        ('[[nvme]]\npath = "/dev/a"\nthreads = 4.5\n', {}, ["must be a whole number"]),
        ('[[nvme]]\npath = "/dev/a"\n[[nvme]]\npath = "/dev/../dev/a"\n', {}, [":4:", "named twice"]),
        ("", {"nvme__threads": "4"}, ["nvme.path: a device needs a path"]),
        (
            '[[nvme]]\npath = "/dev/a"\n[[nvme]]\npath = "/dev/b"\n',
            {"nvme__path": "/dev/c"},
            ["--nvme-path", "several [[nvme]] tables"],
        ),
        (
            '[[nvme]]\npath = "/dev/a"\n',
            {"node__id": "", "control__listen": "127.0.0.1:0"},
            ["node.id", "the same after a restart"],
        ),
        ('[tiers]\nspill = "always"\n', {}, [":2: tiers.spill must be one of evict, eager, never"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(text, flags, says, tmp_path) -> None:
    message = refusal(tmp_path, text, **flags)
    for part in says:
        assert part in message


@pytest.mark.parametrize(
    ("size", "says"),
    [("0", "no /nowhere/a: .* say how large"), ("1GiB", "there is no folder /nowhere")],
)
def test_a_file_that_cannot_be_made_is_refused_at_the_start(size, says, tmp_path) -> None:
    """Not earlier: `kvstore format --size` reads the same configuration to make the file."""
    config = loaded(tmp_path, nvme__path="/nowhere/a", nvme__size_bytes=size).config
    with pytest.raises(BadConfiguration, match=says):
        make_tier(config)


def test_printed_devices_are_a_configuration_file(tmp_path, capsys) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[node]\nid = "n1"\n' + TWO.format(folder=tmp_path))
    assert main(["config", "--config", str(file), "--dram-size-bytes", "64MiB"]) == 0
    printed = capsys.readouterr().out
    assert f"threads = 8  # {file}:9" in printed
    (tmp_path / "again.toml").write_text(printed)
    assert (
        load_config({}, {}, str(tmp_path / "again.toml")).config.nvme
        == load_config({}, {}, str(file)).config.nvme
    )


async def test_a_file_is_made_once_and_found_again(tmp_path) -> None:
    path = f"{tmp_path}/device"
    config = loaded(tmp_path, nvme__path=path, nvme__size_bytes="16MiB", dram__page_bytes="64KiB").config
    (tmp_path / "device.unfinished").write_text("a start that was killed")
    make_tier(config)
    assert os.stat(path).st_size == 16 * limits.MIB
    assert os.stat(path).st_blocks * 512 >= 16 * limits.MIB, "it has holes: it may run out of room later"
    made = FileDevice.open(path)
    label = read_label(made)
    assert (label.node, label.page_bytes) == ("n1", 64 * limits.KIB)
    made.close()
    tier = make_tier(config)
    await tier.start()
    await tier.stop()
    again = FileDevice.open(path)
    assert read_label(again).uuid == label.uuid
    again.close()
    assert not (tmp_path / "device.unfinished").exists()


async def test_a_file_that_is_not_ours_is_left_alone(tmp_path) -> None:
    path = tmp_path / "photos"
    path.write_bytes(b"jpeg" * limits.MIB)
    tier = make_tier(loaded(tmp_path, nvme__path=str(path), nvme__size_bytes="16MiB").config)
    with pytest.raises(DeviceRefused, match="holds something that is not ours"):
        await tier.start()
    assert path.read_bytes() == b"jpeg" * limits.MIB


def test_a_file_for_which_there_is_no_room_is_not_left_behind(tmp_path) -> None:
    config = loaded(tmp_path, nvme__path=f"{tmp_path}/large", nvme__size_bytes="900TiB").config
    with pytest.raises(KVStoreError, match=r"no room for .*large"):
        make_tier(config)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kvstore.toml"]


def test_a_name_that_is_too_long_for_a_label_leaves_no_file(tmp_path) -> None:
    config = loaded(
        tmp_path, nvme__path=f"{tmp_path}/device", nvme__size_bytes="16MiB", node__id="n" * 300
    ).config
    with pytest.raises(BadConfiguration, match="1 to 256 bytes"):
        make_tier(config)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kvstore.toml"]
