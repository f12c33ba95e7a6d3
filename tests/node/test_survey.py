"""What `kvstore check` finds: each trouble is seen, named and given a remedy, and what is well is left alone.

Mutants that must fail here: a default of the kernel that counts as fine; a device whose link is down being opened;
the better of two paths deciding; a partition that is not traced to its disk; a label that is not looked at.
"""

import os
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.node import Config, State, load_config
from kvstore.node.survey.devices import survey_devices
from kvstore.node.survey.links import survey_link
from kvstore.node.survey.memory import survey_memory
from kvstore.node.survey.services import survey_ports, survey_redis
from kvstore.node.survey.transfer import judge
from kvstore.tiers import DeviceDown, FileDevice
from kvstore.transfer import SelfTransfer
from tests.support import RedisServer, free_port

NODE = "node-a"


class Sysfs:
    """A tree as the kernel shows it, with a file on a disk of it."""

    def __init__(self, root: Path) -> None:
        self.root = root / "sys"
        self.file = root / "file"
        self.file.touch()
        number = self.file.stat().st_dev
        self.number = f"{os.major(number)}:{os.minor(number)}"

    def write(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(self.root / target)

    def controller(self, name: str, **attributes: str) -> None:
        values = {
            "transport": "tcp",
            "state": "live",
            "address": "traddr=10.0.0.5,trsvcid=4420",
            "subsysnqn": "nqn.kv",
        }
        for attribute, value in (values | attributes).items():
            self.write(f"devices/{name}/{attribute}", value)
        self.link(f"class/nvme/{name}", f"devices/{name}")

    def multipath_disk(self, *controllers: dict[str, str]) -> None:
        """The test's file is on nvme0n1 of a subsystem with these controllers."""
        self.write("devices/subsystem/subsysnqn", "nqn.kv")
        self.link("devices/subsystem/nvme0n1/device", "devices/subsystem")
        self.link(f"dev/block/{self.number}", "devices/subsystem/nvme0n1")
        for number, attributes in enumerate(controllers):
            self.controller(f"nvme{number}", **attributes)

    def findings(self):
        return survey_link(str(self.file), self.root)


@pytest.fixture
def sysfs(tmp_path) -> Sysfs:
    return Sysfs(tmp_path)


DEFAULTS = {"fast_io_fail_tmo": "off", "ctrl_loss_tmo": "600"}
SET = {"fast_io_fail_tmo": "2", "ctrl_loss_tmo": "off"}

LINKS = [
    ([SET], "ok", "I/O fails soon", ""),
    ([DEFAULTS], "warn", "I/O hangs for 600 s", "echo 2 > /sys/class/nvme/nvme0/fast_io_fail_tmo"),
    ([{**DEFAULTS, "transport": "rdma"}], "warn", "nvme0 over rdma", "deploy/nvmeof/attach.sh"),
    ([{"fast_io_fail_tmo": "off", "ctrl_loss_tmo": "off"}], "warn", "I/O hangs for ever", "fast_io_fail_tmo"),
    (
        [{"fast_io_fail_tmo": "300", "ctrl_loss_tmo": "off"}],
        "warn",
        "I/O hangs for 300 s",
        "fast_io_fail_tmo",
    ),
    ([{"ctrl_loss_tmo": "600"}], "warn", "I/O hangs for 600 s", "fast_io_fail_tmo"),
    ([{"fast_io_fail_tmo": "2", "ctrl_loss_tmo": "60"}], "warn", "must be attached again", "echo -1"),
    ([SET, DEFAULTS], "warn", "I/O hangs for 600 s", "/sys/class/nvme/nvme1/fast_io_fail_tmo"),
    ([SET, {**SET, "state": "connecting"}], "ok", "nvme1 over tcp (connecting", ""),
    ([{**SET, "state": "connecting"}], "fail", "it is not connected", "look at the network"),
    ([{"transport": "pcie"}], "ok", "local NVMe (pcie)", ""),
]


@pytest.mark.parametrize(("controllers", "state", "says", "remedy"), LINKS)
def test_a_link_is_judged_by_its_worst_path(sysfs, controllers, state, says, remedy) -> None:
    sysfs.multipath_disk(*controllers)
    (finding,) = sysfs.findings()
    assert (finding.subject, finding.state) == (f"link of {sysfs.file}", state)
    assert says in finding.text and remedy in finding.remedy
    assert bool(finding.remedy) == (state != "ok")


def test_a_partition_and_a_mapped_volume_lead_to_their_disk(sysfs) -> None:
    sysfs.controller("nvme3", **DEFAULTS)
    sysfs.link("devices/nvme3/nvme3n1/device", "devices/nvme3")
    sysfs.write("devices/nvme3/nvme3n1/nvme3n1p1/partition", "1")
    sysfs.link("devices/virtual/dm-0/slaves/nvme3n1p1", "devices/nvme3/nvme3n1/nvme3n1p1")
    sysfs.link(f"dev/block/{sysfs.number}", "devices/virtual/dm-0")
    (finding,) = sysfs.findings()
    assert finding.state is State.WARN and "nvme3 over tcp" in finding.text


def test_other_disks_and_other_subsystems_have_no_say(sysfs) -> None:
    sysfs.multipath_disk(SET)
    sysfs.controller("nvme7", **DEFAULTS, subsysnqn="nqn.other")
    (finding,) = sysfs.findings()
    assert finding.state is State.OK
    sysfs.write("devices/sda/size", "1")
    (sysfs.root / f"dev/block/{sysfs.number}").unlink()
    sysfs.link(f"dev/block/{sysfs.number}", "devices/sda")
    assert sysfs.findings() == []


def config_with(path: Path, **given: object) -> Config:
    return load_config(
        {"node.id": NODE, "dram.size_bytes": "64MiB", "nvme.path": str(path), **given}, environment={}
    ).config


def device_finding(path: Path, size: str = "0"):
    (finding,) = [
        each
        for each in survey_devices(config_with(path, **{"nvme.size_bytes": size}))
        if each.subject.startswith("device")
    ]
    return finding


def made(path: Path, node: str = NODE) -> Path:
    assert main(["format", str(path), "--size", "64MiB", "--node-id", node]) == 0
    return path


def test_our_device_is_well_and_left_as_it_is(tmp_path) -> None:
    disk = made(tmp_path / "disk")
    before = disk.read_bytes()
    finding = device_finding(disk)
    assert finding.state is State.OK and "62 pages of 1048576 B" in finding.text
    assert disk.read_bytes() == before


def test_somebody_elses_blank_and_foreign_devices_fail(tmp_path) -> None:
    other = device_finding(made(tmp_path / "other", "node-b"))
    assert other.state is State.FAIL and "'node-b'" in other.text and "kvstore format" in other.remedy
    (tmp_path / "blank").write_bytes(bytes(1 << 20))
    blank = device_finding(tmp_path / "blank")
    assert blank.state is State.FAIL and "blank" in blank.text and "kvstore format" in blank.remedy
    gone = device_finding(Path("/dev/no_such_disk"))
    assert gone.state is State.FAIL and "not there" in gone.text and "attach" in gone.remedy


def test_a_device_of_another_user_is_told(tmp_path, monkeypatch) -> None:
    """Root may do everything, so the kernel's answer is another one here."""
    disk = made(tmp_path / "disk")
    monkeypatch.setattr("os.access", lambda path, _: path != str(disk))
    finding = device_finding(disk)
    assert finding.state is State.FAIL
    assert "may not read and write it" in finding.text and "udev" in finding.remedy


def test_a_device_in_use_is_told_with_its_user(tmp_path) -> None:
    disk = made(tmp_path / "disk")
    user = FileDevice.open(str(disk))
    finding = device_finding(disk)
    user.close()
    assert finding.state is State.FAIL
    assert f"process {os.getpid()} (" in finding.text


def test_a_device_whose_link_is_down_is_not_touched(sysfs) -> None:
    """The file is blank, which is a failure of its own, if it is looked at."""
    sysfs.multipath_disk({**SET, "state": "connecting"})
    findings = survey_devices(config_with(sysfs.file), sysfs.root)
    assert [each.subject for each in findings] == [f"link of {sysfs.file}"]


def test_a_file_that_is_to_be_made_needs_a_size_and_room(tmp_path) -> None:
    disk = tmp_path / "disk"
    assert device_finding(disk).state is State.FAIL
    assert device_finding(disk, "64MiB").state is State.OK
    assert "it is to have" in device_finding(disk, "1000TiB").text
    assert "no folder" in device_finding(tmp_path / "none/disk", "64MiB").text
    assert not disk.exists()


def test_buffered_io_is_a_warning(tmp_path, monkeypatch) -> None:
    disk = made(tmp_path / "disk")
    real = FileDevice.open

    def buffered(path: str) -> FileDevice:
        device = real(path)
        device.warnings = ["it cannot be read past the page cache (O_DIRECT)"]
        return device

    monkeypatch.setattr(FileDevice, "open", buffered)
    finding = device_finding(disk)
    assert finding.state is State.WARN and "O_DIRECT" in finding.remedy


def test_a_device_that_does_not_answer_is_given_up(tmp_path, monkeypatch) -> None:
    disk = made(tmp_path / "disk")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def hang(path: str) -> FileDevice:
        raise DeviceDown(f"{path} said {fifo.read_bytes()!r}")

    monkeypatch.setattr(FileDevice, "open", hang)
    monkeypatch.setattr("kvstore.node.survey.devices.ANSWER_S", 0.05)
    finding = device_finding(disk)
    fifo.write_bytes(b"")  # lets the thread go
    assert finding.state is State.FAIL and "does not answer within 0.05 s" in finding.text


def root_with(tmp_path: Path, capabilities: str, shmem: str) -> Path:
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    status.write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    pages.parent.mkdir(parents=True)
    pages.write_text(f"{shmem}\n")
    return tmp_path


NEVER, ADVISE = "always within_size advise [never] deny force", "always within_size [advise] never deny force"
MEMORY = [
    (8 << 20, "0", ADVISE, {}, "warn", "ok"),
    (-1, "0", ADVISE, {}, "ok", "ok"),
    (64 << 20, "0", NEVER, {}, "ok", "warn"),
    ((64 << 20) - 1, "0000000000004000", NEVER, {}, "ok", "warn"),  # CAP_IPC_LOCK
    (8 << 20, "0", NEVER, {"dram.lock": "false", "dram.huge_pages": "false"}, "ok", "ok"),
    (8 << 20, "0", ADVISE, {"transfer.protocol": "rdma", "dram.lock": "false"}, "fail", "ok"),
]


@pytest.mark.parametrize(("limit", "capabilities", "shmem", "given", "lock", "huge"), MEMORY)
def test_memory(tmp_path, limit, capabilities, shmem, given, lock, huge) -> None:
    config = load_config({"dram.size_bytes": "64MiB", **given}, environment={}).config
    found = survey_memory(config, root_with(tmp_path, capabilities, shmem), limit)
    assert [each.state for each in found] == [lock, huge]
    assert all(each.remedy for each in found if each.state is not State.OK)


async def test_redis_is_reached_and_its_version_told(tmp_path) -> None:
    with RedisServer(tmp_path) as server:
        config = load_config({"redis.url": server.url}, environment={}).config
        finding = await survey_redis(config)
        assert finding.state is State.OK and finding.text.startswith("version ")
    finding = await survey_redis(config)
    assert (
        finding.state is State.FAIL
        and "Connect call failed" in finding.text
        and "check that it runs" in finding.remedy
    )


async def test_an_old_redis_is_refused(tmp_path, monkeypatch) -> None:
    async def version(_: object) -> str:
        return "6.0.16"

    monkeypatch.setattr("kvstore.index.RedisIndex.version", version)
    finding = await survey_redis(load_config({"redis.url": "redis://127.0.0.1:1"}, environment={}).config)
    assert finding.state is State.FAIL and "6.2 or later" in finding.text


async def test_an_embedded_redis_is_found_or_missed(monkeypatch, tmp_path) -> None:
    config = load_config({}, environment={}).config
    finding = await survey_redis(config)
    assert finding.state is State.OK and "embedded" in finding.subject
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    finding = await survey_redis(config)
    assert finding.state is State.FAIL and "apt-get install redis-server" in finding.remedy


def test_ports_that_are_taken_name_their_holder(redis_server) -> None:
    taken = f"127.0.0.1:{redis_server.port}"
    config = load_config(
        {"control.listen": taken, "admin.listen": f"127.0.0.1:{free_port()}"}, environment={}
    )
    control, admin = survey_ports(config.config)
    assert control.state is State.FAIL and "redis" in control.text and "--control-listen" in control.remedy
    assert admin.state is State.OK


def test_a_node_that_others_reach_is_told_to_fence_mooncake() -> None:
    given = {"control.listen": "127.0.0.1:0", "admin.listen": "127.0.0.1:0", "node.advertise": "10.0.0.7"}
    *_, mooncake = survey_ports(load_config(given, environment={}).config)
    assert mooncake.state is State.WARN and "15000-17000" in mooncake.remedy


MIB = 1 << 20
MOVED = [
    ("tcp", SelfTransfer(size_bytes=16 * MIB, ip_bytes=17 * MIB), "ok", "by tcp"),
    ("tcp", SelfTransfer(size_bytes=16 * MIB, ip_bytes=17 * MIB, rdma_packets=4_100), "fail", "by rdma"),
    ("tcp", SelfTransfer(size_bytes=16 * MIB, ip_bytes=100), "fail", "not by tcp"),
    ("rdma", SelfTransfer(size_bytes=16 * MIB, ip_bytes=17 * MIB), "fail", "by tcp"),
    ("rdma", SelfTransfer(size_bytes=16 * MIB, ip_bytes=17 * MIB, rdma_packets=16_400), "ok", "by rdma"),
    ("rdma", SelfTransfer(size_bytes=16 * MIB, ip_bytes=100), "ok", "not over TCP"),
    ("rdma", SelfTransfer(error="No device. Bring one."), "fail", "No device"),
]


@pytest.mark.parametrize(("protocol", "moved", "state", "says"), MOVED)
def test_counters_decide_which_transport_moved_bytes(protocol, moved, state, says) -> None:
    finding = judge("mooncake", protocol, moved)
    assert finding.state == state and says in finding.text
