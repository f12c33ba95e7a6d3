"""A real `vllm serve` process and what the demo asks of it, over its OpenAI API."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import httpx

from deploy.demo.metrics import total

START_S_MAX = 240.0
ANSWER_S_MAX = 240.0
RESET_S_MAX = 30.0
MODEL_NAME = "smollm2"

Prompt = str | list[int]
"""A text, or token ids."""


class Streamed(NamedTuple):
    """What came back for one prompt."""

    text: str
    first_token_s: float
    prompt_tokens: int
    hand_off: dict[str, Any] | None


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt. The token counts by source are vLLM's own counters' differences; of those
    pulled, `from_nvme` were promised when they were on NVMe."""

    text: str
    first_token_s: float
    prompt_tokens: int
    computed: int
    pulled: int
    local: int
    hand_off: dict[str, Any] | None
    from_nvme: int = 0


class Engine:
    """One vLLM instance in a process group of its own, so that a kill takes all of it.

    Args:
        name: of its log.
        model: folder.
        port: of its API, on loopback.
        logs: folder for its log.
        store: the value of --kv-transfer-config; None: no connector.
        flags: more words for `vllm serve`; the last of a kind wins.
        env: more variables of its process.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        port: int,
        logs: Path,
        *,
        store: str | None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = logs / f"{name}.log"
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_S_MAX)
        self._log: TextIO = self.log_path.open("w")
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
        command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
        if store is not None:
            command += ["--kv-transfer-config", store]
        command += flags
        self.command = command
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ
            | {
                "HF_HUB_OFFLINE": "1",
                # Left to itself, vLLM gives an engine with a connector more threads than one without: times with and
                # without a store could not be compared.
                "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache, which the negative control needs
            }
            | dict(env or {}),
        )

    def wait_ready(self) -> float:
        """Seconds from start until it serves.

        Raises:
            DemoFailed: it ended, or took too long; its log's end says why.
        """
        while time.monotonic() - self.started < START_S_MAX:
            if self.serves():
                return time.monotonic() - self.started
            time.sleep(0.1)
        raise DemoFailed(f"{self.name} was not ready after {START_S_MAX:.0f} s", self.log_path)

    def serves(self) -> bool:
        """Whether it answers by now.

        Raises:
            DemoFailed: it has ended; its log's end says why.
        """
        if self._process.poll() is not None:
            raise DemoFailed(f"{self.name} ended with exit code {self._process.returncode}", self.log_path)
        try:
            return self._http.get("/health", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def ask(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        hand_off: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> Answer:
        """One greedy completion, streamed to see when the first token came."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if hand_off is not None:
            body["kv_transfer_params"] = hand_off
        if salt is not None:
            body["cache_salt"] = salt
        return self.counted(lambda: streamed(self._http, body, self._expect_ok))

    def counted(self, ask: Callable[[], Streamed]) -> Answer:
        """What `ask` gets, with this engine's own counts of where the prompt's tokens came from meanwhile."""
        before, on_disk = self.tokens_by_source(), self._hits_on_disk()
        answer = ask()
        after = self.tokens_by_source()
        return Answer(
            answer.text,
            answer.first_token_s,
            answer.prompt_tokens,
            computed=after["local_compute"] - before["local_compute"],
            pulled=after["external_kv_transfer"] - before["external_kv_transfer"],
            local=after["local_cache_hit"] - before["local_cache_hit"],
            hand_off=answer.hand_off,
            from_nvme=self._hits_on_disk() - on_disk,
        )

    def complete(
        self, prompt: Prompt, max_tokens: int, *, salt: str | None = None, patience_s: float = ANSWER_S_MAX
    ) -> str | None:
        """One greedy completion, from any thread; None when it took longer than `patience_s`: vLLM then aborts it."""
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True} | ({"cache_salt": salt} if salt else {})
        try:
            reply = self._http.post("/v1/completions", json=body, timeout=patience_s)
        except httpx.ReadTimeout:
            return None
        self._expect_ok(reply)
        return str(reply.json()["choices"][0]["text"])

    def prefill(self, prompt: Prompt) -> dict[str, Any]:
        """Computes a prompt and one token; the hand-off for a decode engine."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        reply = self._http.post("/v1/completions", json=body)
        self._expect_ok(reply)
        hand_off = reply.json().get("kv_transfer_params")
        if not hand_off:
            raise DemoFailed(f"{self.name} returned no kv_transfer_params to hand off", self.log_path)
        assert isinstance(hand_off, dict)
        return hand_off

    def tokens_by_source(self) -> dict[str, int]:
        """vLLM's own count of prompt tokens: local_compute, local_cache_hit, external_kv_transfer."""
        page = self._http.get("/metrics").text
        name = "vllm:prompt_tokens_by_source_total"
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return {source: int(total(page, name, {"source": source})) for source in sources}

    def _hits_on_disk(self) -> int:
        return int(self.metric("vllm:prompt_tokens_cached_by_source_total", source="disk"))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        return total(self._http.get("/metrics").text, name, labels)

    def forget_local_prefixes(self, *, external: bool = False) -> None:
        """Empties the engine's own prefix cache, and with `external` has it leave the store's behind as well.

        vLLM refuses while blocks are in use, those of a push under way included.

        Raises:
            DemoFailed: they were in use for too long.
        """
        deadline = time.monotonic() + RESET_S_MAX
        while time.monotonic() < deadline:
            reply = self._http.post("/reset_prefix_cache", params={"reset_external": external})
            self._expect_ok(reply)
            if reply.json()["success"]:
                return
            time.sleep(0.1)
        raise DemoFailed(f"{self.name} could not empty its prefix cache", self.log_path)

    @property
    def running(self) -> bool:
        """Whether its first process is there."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """A signal to every process of the engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to every process of the engine: nothing of it gets a chance to say goodbye."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._http.close()
        self._log.close()

    def stop(self) -> None:
        """The orderly end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self.kill()  # whatever is left of the group

    def _expect_ok(self, reply: httpx.Response) -> None:
        if reply.status_code != httpx.codes.OK:
            raise DemoFailed(f"{self.name} answered {reply.status_code}: {reply.text[:300]}", self.log_path)


def streamed(
    http: httpx.Client, body: dict[str, Any], expect_ok: Callable[[httpx.Response], None]
) -> Streamed:
    """Asks for a completion and listens to the end of its stream.

    Args:
        http: a client of an engine, or of a proxy.
        body: the request.
        expect_ok: raises what is to be raised of a response that is not 200.

    Raises:
        DemoFailed: the stream ended with an error.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    began = time.monotonic()
    first_token_s, text, prompt_tokens, parameters = 0.0, "", 0, None
    with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            reply.read()
            expect_ok(reply)
        for event in _events(reply):
            if "error" in event:
                raise DemoFailed(f"{http.base_url}: the answer broke off: {event['error']}")
            if event["choices"]:
                first_token_s = first_token_s or time.monotonic() - began
                text += event["choices"][0]["text"]
            if event.get("usage"):
                prompt_tokens = event["usage"]["prompt_tokens"]
            parameters = event.get("kv_transfer_params") or parameters
    return Streamed(text, first_token_s, prompt_tokens, parameters)


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


class DemoFailed(Exception):
    """What the demo shows is not true here. Carries the log that tells more."""

    def __init__(self, message: str, log_path: Path | None = None) -> None:
        super().__init__(message)
        self.log_path = log_path
