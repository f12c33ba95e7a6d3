"""A real `kvstore serve` process and what the demo asks of it, over its admin HTTP and banner."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deploy.demo.engine import DemoFailed

START_S_MAX = 30.0


class Node:
    """One store node on loopback, with its embedded Redis."""

    def __init__(self, control_port: int, admin_port: int, logs: Path) -> None:
        self.log_path = logs / "kvstore.log"
        self.control = f"127.0.0.1:{control_port}"
        self._log: TextIO = self.log_path.open("w")
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", timeout=5.0)
        command = [str(Path(sys.executable).with_name("kvstore")), "serve", "--dram-size-bytes", "2GiB"]
        command += ["--control-listen", self.control, "--admin-listen", f"127.0.0.1:{admin_port}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        """Returns when the node serves.

        Raises:
            DemoFailed: it ended or took too long.
        """
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DemoFailed(f"kvstore ended with exit code {self._process.returncode}", self.log_path)
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
        text = self._http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

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
