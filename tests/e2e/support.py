"""What end-to-end tests share: a port that can tell and lose what passes, and the counters of engines and nodes."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from deploy.demo.engine import MODEL_NAME, Answer, Engine, Prompt
from deploy.demo.node import Node
from tests.support import free_port, wait_until

PIECE_BYTES = 1 << 16
WAITED = "vllm:request_queue_time_seconds_sum"
MOONCAKE_PORTS = range(15_000, 17_001)


def transfer_config(control: str, **settings: object) -> str:
    """The value of --kv-transfer-config for a store at `control`. Whatever is stored is loaded: what these tests see
    must not depend on how fast the machine is at the moment."""
    return json.dumps(
        {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"node": control, "load_policy": "always", **settings},
        }
    )


@dataclass(frozen=True)
class Asked:
    """An answer, and what vLLM's own counters say of the store's part in it.

    `promised` tokens were given to a load; what of them is not `answer.pulled` was lost in that load. `waited_s` is
    until vLLM began to compute: all that a store can add, however fast the machine is at the moment.
    """

    answer: Answer
    queried: int
    promised: int
    waited_s: float
    took_s: float

    @property
    def lost(self) -> int:
        """Tokens of a load that was under way when something happened to it."""
        return self.promised - self.answer.pulled

    def __str__(self) -> str:
        answer = self.answer
        origin = f"pulled {answer.pulled}, computed {answer.computed}, local {answer.local}"
        return f"promised {self.promised}, {origin}: waited {self.waited_s:.2f} s, took {self.took_s:.2f} s"


def ask(engine: Engine, prompt: Prompt, max_tokens: int, **more: Any) -> Asked:
    """One request and nothing beside it."""
    before, waited_s = external(engine), engine.metric(WAITED)
    began = time.monotonic()
    answer = engine.ask(prompt, max_tokens, **more)
    took_s = time.monotonic() - began
    after = external(engine)
    waited_s = engine.metric(WAITED) - waited_s
    return Asked(answer, after[0] - before[0], after[1] - before[1], waited_s, took_s)


class Completed(NamedTuple):
    """A completion in token ids, and the id of its response."""

    prompt: list[int]
    answer: list[int]
    request: str


def complete_ids(
    engine: Engine, prompt: str | list[int], max_tokens: int, salt: str | None = None
) -> Completed:
    """One greedy completion."""
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(
        f"{engine.url}/v1/completions", json=body | ({"cache_salt": salt} if salt else {}), timeout=300
    )
    said = reply.raise_for_status().json()
    [choice] = said["choices"]
    return Completed(choice["prompt_token_ids"], choice["token_ids"], said["id"])


def external(engine: Engine) -> tuple[int, int]:
    """(queried, hit) tokens of vLLM's external prefix cache, since its start."""
    return (
        int(engine.metric("vllm:external_prefix_cache_queries_total")),
        int(engine.metric("vllm:external_prefix_cache_hits_total")),
    )


def stored(node: Node) -> int:
    """Objects that the node holds."""
    return int(node.gauge("kvstore_objects", tier="dram"))


def held(node: Node) -> dict[str, float]:
    """Everything at a node that must end by itself, as far as there is any."""
    names = {
        "leases": "kvstore_leases",
        "reservations": "kvstore_reservations",
        "parked": "kvstore_parked_requests",
    }
    counts = {word: node.gauge(name) for word, name in names.items()}
    for word in ("held", "reserved", "leased"):
        counts[f"{word} bytes"] = node.gauge(f"kvstore_tier_{word}_bytes")
    return {word: count for word, count in counts.items() if count}


def unread_bytes(node: Node) -> int:
    """What was sent to the node's Mooncake ports and it has not read: of a transfer that it was stopped in."""
    pid = node.pid
    links = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir())
    mine = {str(link)[len("socket:[") : -1] for link in links if str(link).startswith("socket:")}
    unread = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if port in MOONCAKE_PORTS and fields[9] in mine:
                unread += int(fields[4].partition(":")[2], 16)
    return unread


def wait_for_nothing_held(node: Node, deadline_s: float) -> None:
    """Returns when no lease, reservation or held page is left."""
    wait_until(lambda: not held(node), deadline_s, "everything held to come to its end")


class Forwarder:
    """A loopback port whose connections go on to another one.

    `losing` swallows all that comes from either side, and keeps connections open. `on_reply` waits for a word
    in what comes back.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.losing = False
        self._awaited: tuple[bytes, Callable[[], object]] | None = None
        self.seen = threading.Event()
        self._near: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def on_reply(self, word: bytes, action: Callable[[], object]) -> None:
        """Once, the next time this word comes back: calls `action`, and only then passes the word on."""
        self.seen.clear()
        self._awaited = (word, action)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                self._near.append(near)
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        refused = contextlib.suppress(OSError)  # nobody there: `near` is closed, which is as good
        with near, refused, socket.create_connection(self._target, 5.0) as far:
            far.settimeout(None)
            there = threading.Thread(target=self._pump, args=(near, far, False), daemon=True)
            there.start()
            self._pump(far, near, True)
            there.join()

    def _pump(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):  # the other direction was ended
            while data := source.recv(PIECE_BYTES):
                if back:
                    self._look(data)
                if not self.losing:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):  # it is shut already
                end.shutdown(socket.SHUT_RDWR)

    def _look(self, data: bytes) -> None:
        awaited = self._awaited
        if awaited is not None and awaited[0] in data:
            self._awaited = None
            awaited[1]()
            self.seen.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *self._near):
            with contextlib.suppress(OSError):  # it is closed already
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def prompt_text(repository: Path, name: str) -> str:
    """One of the demo's prompts."""
    return (repository / f"deploy/demo/prompts/{name}.txt").read_text()
