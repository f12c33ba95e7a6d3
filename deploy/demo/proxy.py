"""A real `kvstore proxy` process: what clients ask instead of engines."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import httpx

from deploy.demo.engine import ANSWER_S_MAX, MODEL_NAME, Answer, DemoFailed, Engine, Prompt, streamed
from deploy.demo.metrics import total

START_S_MAX = 30.0


class Proxy:
    """One proxy on loopback, in front of engines that may or may not be up.

    Args:
        prefill, decode: the engines.
        port: where it listens.
        logs: the folder for its log.
        flags: more words for `kvstore proxy`.
    """

    def __init__(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        port: int,
        logs: Path,
        *,
        flags: Sequence[str] = (),
    ) -> None:
        self.log_path = logs / "proxy.log"
        self.url = f"http://127.0.0.1:{port}"
        self._log: TextIO = self.log_path.open("w")
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_S_MAX)
        self.command = [str(Path(sys.executable).with_name("kvstore")), "proxy"]
        self.command += ["--prefill", *(engine.url for engine in prefill)] if prefill else []
        self.command += ["--decode", *(engine.url for engine in decode)]
        self.command += ["--listen", f"127.0.0.1:{port}", *flags]
        self._process = subprocess.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        """Returns when a decode engine is up behind it.

        Raises:
            DemoFailed: it ended or took too long.
        """
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DemoFailed(f"the proxy ended with exit code {self._process.returncode}", self.log_path)
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/healthz", timeout=2.0).status_code == httpx.codes.OK:
                    return
            time.sleep(0.05)
        raise DemoFailed(f"the proxy was not ready after {START_S_MAX:.0f} s", self.log_path)

    def ask(self, prompt: Prompt, max_tokens: int, decode: Engine, *, salt: str | None = None) -> Answer:
        """One greedy completion as a client gets it; the origin of its tokens is counted by its decode engine."""
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True} | ({"cache_salt": salt} if salt else {})
        return decode.counted(lambda: streamed(self._http, body, self._expect_ok))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        return total(self._http.get("/metrics").text, name, labels)

    def stop(self) -> None:
        """SIGTERM, and the end of its log."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._http.close()
        self._log.close()

    def _expect_ok(self, reply: httpx.Response) -> None:
        if reply.status_code != httpx.codes.OK:
            raise DemoFailed(f"the proxy answered {reply.status_code}: {reply.text[:300]}", self.log_path)
