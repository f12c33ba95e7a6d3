"""A target in a network of its own, and the link to it."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

HERE, THERE = "10.9.0.1", "10.9.0.2"
NQN = "nqn.2026-01.org.example:kv"
_NETNS = Path("/run/netns/target")
_NVMET = Path("/sys/kernel/config/nvmet")
_CLONE_NEWNET = 0x40000000


def run(*words: str) -> str:
    """A command's output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def load(*modules: str) -> None:
    """Kernel modules, those that are built in aside."""
    for module in modules:
        subprocess.run(["modprobe", module], check=False, capture_output=True)


class Link:
    """Two ends of a cable; packets vanish while it is down."""

    def __init__(self) -> None:
        run("ip", "netns", "add", "target")
        run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", "target")
        run("ip", "addr", "add", f"{HERE}/24", "dev", "here")
        run("ip", "link", "set", "here", "mtu", "65000", "up")
        there = ("ip", "-n", "target")
        run(*there, "addr", "add", f"{THERE}/24", "dev", "there")
        run(*there, "link", "set", "there", "mtu", "65000", "up")

    def down(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        run("ip", "link", "set", "here", "down")

    def up(self) -> None:
        """It is whole again."""
        run("ip", "link", "set", "here", "up")


def serve(block_device: str) -> None:
    """An NVMe/TCP target of the kernel's, which exports this device at `THERE`."""
    subprocess.run(["mount", "-t", "configfs", "configfs", "/sys/kernel/config"], check=True)
    subsystem = _NVMET / "subsystems" / NQN
    namespace = subsystem / "namespaces/1"
    namespace.mkdir(parents=True)
    (subsystem / "attr_allow_any_host").write_text("1")
    (namespace / "device_path").write_text(block_device)
    (namespace / "enable").write_text("1")
    port = _NVMET / "ports/1"
    port.mkdir()
    for name, value in {"trtype": "tcp", "adrfam": "ipv4", "traddr": THERE, "trsvcid": "4420"}.items():
        (port / f"addr_{name}").write_text(value)
    _in_network_of_target(lambda: (port / "subsystems" / NQN).symlink_to(subsystem))


def _in_network_of_target(act: Callable[[], None]) -> None:
    """A target listens in the network of the process that makes its port."""
    child = os.fork()
    if child == 0:
        with _NETNS.open() as network:
            code = ctypes.CDLL(None).setns(network.fileno(), _CLONE_NEWNET)
        act()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the target does not listen"
