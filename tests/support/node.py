"""A real `kvstore serve` process: small, on free ports, gone with the test."""

import contextlib
import json
import re
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import Process

READY = "kvstore is ready"
READY_S = 120.0  # on a machine that is busy, or emulated; one that ends without is not waited for
PROGRAM: Sequence[str] = (sys.executable, "-m", "kvstore")


class RunningNode:
    """One node process.

    `control` and `admin` are "host:port"; `process` is the handle (`kill`, `stop`, `send`, `output`).
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.banner = process.wait_for_output(READY, READY_S)
        self.control = self.told("control")
        self.admin = self.told("admin")

    def told(self, what: str) -> str:
        """The first word behind `what` in the banner."""
        match = re.search(rf"^ +{what} +(?:http://)?(\S+)", self.banner, re.MULTILINE)
        assert match, f"no {what!r} in the banner:\n{self.banner}"
        return match[1]

    @property
    def pid(self) -> int:
        return self.process.pid

    def get(self, path: str, token: str = "") -> tuple[int, str]:
        """(status, text) of a path of the admin endpoint."""
        request = urllib.request.Request(f"http://{self.admin}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def stats(self) -> dict[str, Any]:
        """`/v1/stats`."""
        status, text = self.get("/v1/stats")
        assert status == 200, text
        content: dict[str, Any] = json.loads(text)
        return content

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()

    def stop(self) -> int:
        """SIGTERM; the exit code. It may write what is only in DRAM to a slow disk first."""
        return self.process.stop(deadline_s=40.0)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send(signal.SIGCONT)


def node_command(**settings: object) -> list[str]:
    """The command line of a small node. `control_listen="..."` becomes `--control-listen=...`, True a bare flag."""
    values = {
        "control_listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "dram_size_bytes": "64MiB",
        **settings,
    }
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    words = [
        flag if value is True else f"{flag}={value}" for flag, value in flags.items() if value is not False
    ]
    return [*PROGRAM, "serve", *words]


@contextlib.contextmanager
def running_node(folder: Path | None = None, **settings: object) -> Iterator[RunningNode]:
    """A node that is ready, with its output in `folder`/node.log; stopped, if need be killed, at the end."""
    with contextlib.ExitStack() as stack:
        home = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield RunningNode(stack.enter_context(Process(node_command(**settings), home / "node.log")))
