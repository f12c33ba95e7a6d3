"""deploy/nvmeof: what the scripts ask nvme-cli and the kernel for. `nvme` is one that behaves as version 2.3 does and
writes down how it was called; the kernel's tree is one of files. `make test-nvmeof` runs them on the real things.

Mutants that must fail here: time-outs that are only asked for at the connection; a second connection to what is
attached; a controller of another subsystem, or of another path, that is taken for ours; a detach of what is in use.
"""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "deploy/nvmeof"
NQN = "nqn.2026-01.org.example:kv"

NVME = """#!/bin/bash
# nvme-cli 2.3, as far as it is used: it has no flag for fast_io_fail_tmo, the kernel's default is off.
printf '%s\\n' "$*" >>"$CALLS"
[[ -z ${FAILS:-} ]] || { echo "Failed to write to /dev/nvme-fabrics: Connection refused" >&2; exit 1; }
[[ $1 == connect ]] || exit 0
for word in "${@:2}"; do
  case $word in
    --transport=*) transport=${word#*=} ;; --traddr=*) traddr=${word#*=} ;; --trsvcid=*) trsvcid=${word#*=} ;;
    --nqn=*) nqn=${word#*=} ;; --reconnect-delay=*) delay=${word#*=} ;; --ctrl-loss-tmo=*) loss=${word#*=} ;;
    --keep-alive-tmo=*) kato=${word#*=} ;; --hostnqn=* | --hostid=* | --nr-io-queues=*) ;;
    *) echo "unrecognized option '$word'" >&2; exit 1 ;;
  esac
done
folder=$SYS/class/nvme/nvme4 disk=$SYS/class/block/nvme4n1
mkdir -p "$folder" "$disk/device"
echo "$transport" >"$folder/transport"; echo "$nqn" >"$folder/subsysnqn"; echo "$kato" >"$folder/kato"
echo "traddr=$traddr,trsvcid=$trsvcid,src_addr=10.0.0.9" >"$folder/address"
echo "$delay" >"$folder/reconnect_delay"; echo "${loss/#-1/off}" >"$folder/ctrl_loss_tmo"
[[ -n ${OLD_KERNEL:-} ]] || echo off >"$folder/fast_io_fail_tmo"
[[ -n ${NO_NAMESPACE:-} ]] || echo "$nqn" >"$disk/device/subsysnqn"
touch "$DEV/nvme4n1"
"""


class Host:
    """A machine of files, on which the scripts run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sys = root / "sys"
        self.calls = root / "calls"
        self.calls.touch()
        (root / "bin").mkdir()
        (root / "dev").mkdir()
        programs = {
            "nvme": NVME,
            "modprobe": '#!/bin/bash\necho "modprobe $*" >>"$CALLS"\n',
            "getent": '#!/bin/bash\n[[ $2 == storage.example ]] && printf "10.0.0.7 STREAM\\n10.0.0.7 DGRAM\\n"\n',
        }
        for name, text in programs.items():
            (root / "bin" / name).write_text(text)
            (root / "bin" / name).chmod(0o755)

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "SYS": str(self.sys),
            "DEV": str(self.root / "dev"),
            "CALLS": str(self.calls),
            "WAIT_S": "1",
        }
        return subprocess.run(
            ["bash", SCRIPTS / script, *arguments],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()

    def attribute(self, name: str, controller: str = "nvme4") -> str:
        return (self.sys / "class/nvme" / controller / name).read_text().strip()

    def controller(self, name: str, **attributes: str) -> None:
        folder = self.sys / "class/nvme" / name
        folder.mkdir(parents=True)
        defaults = {
            "fast_io_fail_tmo": "off",
            "ctrl_loss_tmo": "600",
            "reconnect_delay": "10",
            "transport": "tcp",
        }
        for attribute, value in (defaults | attributes).items():
            (folder / attribute).write_text(f"{value}\n")

    def disk(self, name: str, nqn: str) -> None:
        (self.sys / "class/block" / name / "device").mkdir(parents=True)
        (self.sys / "class/block" / name / "device/subsysnqn").write_text(f"{nqn}\n")
        (self.root / "dev" / name).touch()


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("transport", "address", "traddr", "port"),
    [
        ("tcp", "10.0.0.5", "10.0.0.5", "4420"),
        ("rdma", "10.0.0.5:4421", "10.0.0.5", "4421"),
        ("tcp", "storage.example:8009", "10.0.0.7", "8009"),
        ("tcp", "fd00::5", "fd00::5", "4420"),
        ("tcp", "[fd00::5]", "fd00::5", "4420"),
        ("tcp", "[fd00::5]:4421", "fd00::5", "4421"),
    ],
)
def test_a_namespace_is_attached_with_the_time_outs_of_a_cache(
    host, transport, address, traddr, port
) -> None:
    done = host.run("attach.sh", transport, address, NQN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "/dev/nvme4n1\n", "")
    assert host.called() == [
        f"modprobe -q nvme-{transport}",
        f"connect --transport={transport} --traddr={traddr} --trsvcid={port} --nqn={NQN} "
        "--keep-alive-tmo=2 --reconnect-delay=1 --ctrl-loss-tmo=-1",
    ]
    assert host.attribute("fast_io_fail_tmo") == "2"
    assert host.attribute("reconnect_delay") == "1"
    assert host.attribute("ctrl_loss_tmo") == "-1"  # which a kernel shows as off
    assert host.attribute("kato") == "2"


def test_variables_override(host) -> None:
    variables = {
        "FAST_IO_FAIL_S": "7",
        "CTRL_LOSS_S": "60",
        "KEEP_ALIVE_S": "3",
        "RECONNECT_S": "4",
        "QUEUES": "8",
    }
    done = host.run("attach.sh", "tcp", "10.0.0.5", NQN, HOST_NQN="nqn.host", HOST_ID="id", **variables)
    assert done.returncode == 0, done.stderr
    assert host.called()[-1].endswith(
        "--keep-alive-tmo=3 --reconnect-delay=4 --ctrl-loss-tmo=60 --nr-io-queues=8 --hostnqn=nqn.host --hostid=id"
    )
    assert (host.attribute("fast_io_fail_tmo"), host.attribute("ctrl_loss_tmo")) == ("7", "60")


def test_the_device_is_given_to_the_nodes_user(host) -> None:
    (host.root / "bin/chown").write_text(
        '#!/bin/bash\necho "chown $*" >>"$CALLS"\n[[ $1 != nobody-at-all ]]\n'
    )
    (host.root / "bin/chown").chmod(0o755)
    assert host.run("attach.sh", "tcp", "10.0.0.5", NQN, OWNER="kvstore").returncode == 0
    assert host.called()[-1] == f"chown kvstore {host.root}/dev/nvme4n1"
    done = host.run("attach.sh", "tcp", "10.0.0.5", NQN, OWNER="nobody-at-all")
    assert done.returncode == 1 and "cannot be given to nobody-at-all" in done.stderr


@pytest.mark.parametrize(
    "address", ["traddr=10.0.0.5,trsvcid=4420", "traddr=10.0.0.5,trsvcid=4420,host_traddr=10.0.0.9"]
)
def test_what_is_attached_is_left_attached_and_gets_the_time_outs(host, address) -> None:
    host.controller("nvme2", subsysnqn=NQN, address=address)
    host.disk("nvme2n1", NQN)
    for _ in range(2):
        done = host.run("attach.sh", "tcp", "10.0.0.5", NQN)
        assert (done.returncode, done.stdout) == (0, "/dev/nvme2n1\n"), done.stderr
    assert not [call for call in host.called() if call.startswith("connect")]
    assert host.attribute("fast_io_fail_tmo", "nvme2") == "2"
    assert host.attribute("ctrl_loss_tmo", "nvme2") == "-1"


@pytest.mark.parametrize(
    "other",
    [
        {"subsysnqn": f"{NQN}2", "address": "traddr=10.0.0.5,trsvcid=4420"},
        {"subsysnqn": NQN, "address": "traddr=10.0.0.50,trsvcid=4420"},
        {"subsysnqn": NQN, "address": "traddr=10.0.0.5,trsvcid=4420", "transport": "rdma"},
    ],
)
def test_another_controller_is_not_ours(host, other) -> None:
    host.controller("nvme2", **other)
    done = host.run("attach.sh", "tcp", "10.0.0.5", NQN)
    assert (done.returncode, done.stdout) == (0, "/dev/nvme4n1\n"), done.stderr
    assert host.attribute("fast_io_fail_tmo", "nvme2") == "off"


def test_a_path_of_a_multipath_device_is_not_the_device(host) -> None:
    host.disk("nvme4c1n1", NQN)
    assert host.run("attach.sh", "tcp", "10.0.0.5", NQN).stdout == "/dev/nvme4n1\n"


TROUBLE = [
    ((), {}, "three arguments"),
    (("udp", "10.0.0.5", NQN), {}, "tcp or rdma, not 'udp'"),
    (("tcp", "no.such.host", NQN), {}, "no.such.host cannot be resolved"),
    (("tcp", "10.0.0.5", NQN), {"FAILS": "1"}, "nvme connect to 10.0.0.5:4420 failed"),
    (("tcp", "10.0.0.5", NQN), {"NO_NAMESPACE": "1"}, f"a namespace of {NQN} did not appear within 1 s"),
    (("tcp", "10.0.0.5", NQN), {"OLD_KERNEL": "1"}, "has no fast_io_fail_tmo for nvme4: Linux 5.13"),
]


@pytest.mark.parametrize(("arguments", "variables", "says"), TROUBLE)
def test_trouble_is_told_and_is_exit_code_1(host, arguments, variables, says) -> None:
    done = host.run("attach.sh", *arguments, **variables)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("attach: ") and says in done.stderr


def test_detach_disconnects_the_subsystem(host) -> None:
    host.disk("nvme4n1", NQN)
    done = host.run("detach.sh", NQN)
    assert (done.returncode, done.stderr) == (0, "")
    assert host.called() == [f"disconnect --nqn={NQN}"]


def test_detach_leaves_what_is_in_use(host) -> None:
    host.disk("nvme4n1", NQN)
    host.disk("nvme5n1", "nqn.other")
    with (host.root / "dev/nvme4n1").open():
        done = host.run("detach.sh", NQN)
        assert done.returncode == 1 and "/dev/nvme4n1 is in use" in done.stderr
    (host.sys / "class/block/nvme4n1/holders/dm-0").mkdir(parents=True)
    assert host.run("detach.sh", NQN).returncode == 1
    assert host.called() == []
    with (host.root / "dev/nvme5n1").open():  # another subsystem's
        (host.sys / "class/block/nvme4n1/holders/dm-0").rmdir()
        assert host.run("detach.sh", NQN).returncode == 0


def test_the_unit_calls_the_scripts_as_they_want_to_be_called() -> None:
    unit = (SCRIPTS / "kvstore-nvmeof@.service").read_text()
    assert "attach.sh ${TRANSPORT} ${ADDRESS} ${NQN}\n" in unit
    assert "detach.sh ${NQN}\n" in unit
    assert "\nBefore=kvstore.service\n" in unit
    assert (SCRIPTS.parent / "systemd/kvstore.service").exists()
    for variable in ("TRANSPORT", "ADDRESS", "NQN"):
        assert f"#   {variable}=" in unit


def test_the_page_tells_the_values_that_are_set() -> None:
    script, page = (SCRIPTS / "attach.sh").read_text(), (SCRIPTS / "README.md").read_text()
    for line in script.splitlines():
        variable, default, value = line.partition("=")[0], *line.partition(":-")[1:]
        if default and variable.endswith("_S") and variable != "WAIT_S":
            assert f"| `{variable}` | {value.partition('}')[0]} " in page
