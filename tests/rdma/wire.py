"""Two soft-RoCE adapters with a cable between them, all on one machine.

Both addresses are the machine's own, and the kernel would take the short way; rules make packets really leave by one
end and arrive at the other.
"""

import subprocess
from pathlib import Path

from tests.transfer.mooncake_rig import End

HERE = End("10.9.0.1", "rdma", "rxe0")
THERE = End("10.9.0.2", "rdma", "rxe1")
_ENDS = {"here": ("10.9.0.1", "rxe0", "101"), "there": ("10.9.0.2", "rxe1", "102")}
_MTU = "9000"


def run(*words: str) -> None:
    """A command that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"


def lay() -> None:
    """Loads the modules and connects the adapters."""
    for module in ("crc32_generic", "veth", "ib_uverbs", "rdma_ucm", "rdma_rxe", "sch_netem"):
        subprocess.run(["modprobe", module], check=False, capture_output=True)
    run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
    for name, (address, adapter, table) in _ENDS.items():
        run("ip", "address", "add", f"{address}/24", "dev", name)
        run("ip", "link", "set", name, "mtu", _MTU, "up")
        run("rdma", "link", "add", adapter, "type", "rxe", "netdev", name)
        run("ip", "rule", "add", "pref", table, "oif", name, "lookup", table)
        run("ip", "route", "add", "10.9.0.0/24", "dev", name, "src", address, "table", table)
        run("ip", "route", "add", "local", address, "dev", name, "table", table)
        for option, value in {"accept_local": "1", "rp_filter": "0"}.items():
            Path(f"/proc/sys/net/ipv4/conf/{name}/{option}").write_text(value)
    Path("/proc/sys/net/ipv4/conf/all/accept_local").write_text("1")
    Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0")
    run("ip", "rule", "add", "pref", "200", "lookup", "local")
    run("ip", "rule", "del", "pref", "0")


def blackhole() -> None:
    """From now on what is sent from here is lost."""
    run("tc", "qdisc", "add", "dev", "here", "root", "netem", "loss", "100%")


def heal() -> None:
    """No more."""
    subprocess.run(["tc", "qdisc", "del", "dev", "here", "root"], capture_output=True, check=False)


def packets() -> int:
    """Sent by both adapters so far."""
    counters = Path("/sys/class/infiniband").glob("*/ports/1/hw_counters/sent_pkts")
    return sum(int(each.read_text()) for each in counters)
