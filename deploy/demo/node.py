"""A real `kvstore serve` process and what the demo asks of it, over its admin HTTP and banner."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import httpx

from deploy.demo.engine import DemoFailed
from deploy.demo.metrics import total

START_S_MAX = 30.0
PROGRAM: Sequence[str] = (str(Path(sys.executable).with_name("kvstore")),)


class Node:
    """One store node on loopback, with its embedded Redis unless `flags` name another one.

    Args:
        control_port, admin_port: where it listens.
        logs: the folder for its log.
        name: of its log.
        flags: more words for `kvstore serve`.
        host: the address it listens on and engines reach it at.
        within: the words of a command that runs it somewhere else, such as in a network namespace.
    """

    def __init__(
        self,
        control_port: int,
        admin_port: int,
        logs: Path,
        *,
        name: str = "kvstore",
        flags: Sequence[str] = (),
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> None:
        self.log_path = logs / f"{name}.log"
        self.ports = (control_port, admin_port)
        self.control = f"{host}:{control_port}"
        self._log: TextIO = self.log_path.open("w")
        self._http = httpx.Client(base_url=f"http://{host}:{admin_port}", timeout=5.0)
        command = [*within, *PROGRAM, "serve"]
        command += ["--control-listen", self.control, "--admin-listen", f"{host}:{admin_port}"]
        command += ["--dram-size-bytes", "2GiB", *flags]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        """Returns when the node serves.

        Raises:
            DemoFailed: it ended or took too long.
        """
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code, said = self._process.returncode, self.log_path.read_text().strip()
                raise DemoFailed(
                    f"kvstore ended with exit code {code}: {said.rpartition(chr(10))[2]}", self.log_path
                )
            try:
                if self._http.get("/readyz").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise DemoFailed(f"kvstore was not ready after {START_S_MAX:.0f} s", self.log_path)

    @property
    def transfer_config(self) -> str:
        """The line for vLLM's --kv-transfer-config, as the node prints it for its users."""
        for line in self.log_path.read_text().splitlines():
            start = line.find('{"kv_connector"')
            if start >= 0:
                config, _ = json.JSONDecoder().raw_decode(line[start:])
                return json.dumps(config)
        raise DemoFailed("kvstore printed no --kv-transfer-config line", self.log_path)

    def gauge(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        return total(self._http.get("/metrics").text, name, labels)

    def reports(self, request: str) -> list[dict[str, Any]]:
        """What engines have reported of a request, by the id of its response; empty if nothing."""
        reply = self._http.get(f"/v1/requests/{request}")
        return [] if reply.status_code == httpx.codes.NOT_FOUND else list(reply.json()["reports"])

    def objects(self) -> list[dict[str, Any]]:
        """Everything that the node holds, from /v1/objects."""
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = self._http.get(
                "/v1/objects", params={"limit": 500} | ({"cursor": cursor} if cursor else {})
            ).json()
            found += page["objects"]
            cursor = page.get("cursor") or ""
            if not cursor:
                return found

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """A signal to its process."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: nobody is told."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._http.close()
        self._log.close()
        return code
