"""Real processes that end with the test run, however it ends."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.waiting import wait_until


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A process with its output in a file. `setpriv` has the kernel kill it when pytest dies, even by SIGKILL."""

    def __init__(self, arguments: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self.popen.poll()

    def output(self) -> str:
        """What this process has said; not what a predecessor left in the same file."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def wait_for_output(self, text: str, deadline_s: float = 30.0) -> str:
        """All output so far, once `text` is in it; fails at once when the process ends without."""

        def said() -> str | None:
            ended = self.returncode is not None
            output = self.output()
            if text in output:
                return output
            assert not ended, f"ended with {self.returncode} before it said {text!r}:\n{output[-4000:]}"
            return None

        return (
            wait_until(said, deadline_s, f"{text!r} in the output, which is:\n{self.output()[-4000:]}") or ""
        )

    def send(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT, SIGKILL ..., to this process alone. After SIGSTOP none of its threads runs."""
        self.popen.send_signal(number)
        if number is signal.SIGSTOP:
            wait_until_stopped(self.popen.pid)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.popen.kill()
        self.popen.wait()

    def stop(self, deadline_s: float = 10.0) -> int:
        """SIGTERM; its exit code. SIGKILL if that took too long."""
        self.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(deadline_s)
        self.kill()
        return self.popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.returncode is None:
            self.send(signal.SIGCONT)
            self.stop()


def wait_until_stopped(pid: int) -> None:
    """Returns when SIGSTOP has reached every thread. One of them is told, and tells the others when it is given a
    core: on a busy machine they go on for milliseconds."""
    wait_until(lambda: set(_states(pid)) == {"T"}, what=f"process {pid} to be stopped")


def _states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]
