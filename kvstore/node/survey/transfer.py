"""Mooncake: there, and which transport really moves bytes."""

import subprocess
import sys

from kvstore.node.sections import Config
from kvstore.node.survey.finding import Finding, fail, ok
from kvstore.transfer import SelfTransfer

_DEADLINE_S = 60.0
_REMEDY = "`MC_LOG_LEVEL=INFO kvstore serve` says more"
_PROGRAM = """
import sys
from kvstore.transfer import self_transfer
sys.stdout.write("\\n" + self_transfer(*sys.argv[1:]).encode())
"""


def survey_transfer(config: Config) -> Finding:
    """Moves some MiB from one engine to another, in a process of its own: Mooncake talks to stderr, and keeps what it
    has read of the environment."""
    section = config.transfer
    subject = f"mooncake, {section.protocol}"
    command = [sys.executable, "-c", _PROGRAM, section.host, section.protocol, section.devices]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return fail(subject, f"a transfer on this machine did not end within {_DEADLINE_S:g} s", _REMEDY)
    try:
        moved = SelfTransfer.decode(done.stdout.rpartition("\n")[2])
    except ValueError:
        return fail(
            subject, done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}", _REMEDY
        )
    return judge(subject, section.protocol, moved)


def judge(subject: str, protocol: str, moved: SelfTransfer) -> Finding:
    """What counters say against what was asked for."""
    if moved.error:
        text, _, remedy = moved.error.partition(". ")
        return fail(subject, text, remedy or _REMEDY)
    what = (
        f"{moved.size_bytes >> 20} MiB went from here to here by {moved.went_by} "
        f"({moved.ip_bytes >> 20} MiB over IP, {moved.rdma_packets} RDMA packets)"
    )
    if moved.went_by == protocol:
        return ok(subject, what)
    if (
        protocol == "rdma" and moved.went_by == "memory"
    ):  # some adapters do not count what they send to themselves
        return ok(subject, f"{what}: not over TCP, and not counted by the adapter")
    return fail(subject, f"{what}, not by {protocol}", "look at transfer.devices, and at `rdma link`")
