"""A store that can be harmed in the moment of a load, and one engine that must not notice."""

import contextlib
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from deploy.demo.engine import MODEL_NAME, Answer, Engine
from deploy.demo.node import Node
from tests.e2e.support import Asked, Forwarder, ask, prompt_text, stored, transfer_config, unread_bytes
from tests.support import RedisServer, free_port, wait_until, wait_until_stopped

GENERATED_TOKENS = 16
PROMPT_TOKENS, CHUNK_TOKENS, OBJECTS = 639, 512, 2
LOAD_TIMEOUT_S = 3.0
LOOKUP_TIMEOUT_S = 1.0
MARGIN_S = 0.5
STEP_MAX_S = 0.1
ASKS_MAX = 40  # until hits are back; each is computed whole meanwhile


@dataclass
class Stage:
    """A store that can be harmed, and the one engine that must not notice.

    Args:
        engine: one with a short deadline for loads.
        forwarder: what it believes to be the node.
        prompt, baseline: the request, and its answer when there was no store.
        start: starts a node, given a name for its log.
        nodes: all boots of the store, the last one lives.
        step_s: how long a step of the engine takes that other requests keep busy: a deadline is seen between steps.
    """

    engine: Engine
    forwarder: Forwarder
    prompt: str
    baseline: Asked
    start: Callable[[str], Node]
    nodes: list[Node] = field(default_factory=list)
    step_s: float = 0.0

    @property
    def node(self) -> Node:
        """The boot that was started last."""
        return self.nodes[-1]

    def start_node(self) -> None:
        """A new boot on the same ports."""
        self.nodes.append(self.start(f"node-{len(self.nodes)}"))

    def restart_node(self) -> None:
        """SIGKILL, and a new boot at once."""
        self.node.kill()
        self.start_node()

    def freeze(self) -> None:
        """SIGSTOP: connections stay, and nobody answers."""
        self.node.signal(signal.SIGSTOP)
        wait_until_stopped(self.node.pid)

    def thaw(self) -> None:
        """SIGCONT."""
        self.node.signal(signal.SIGCONT)

    def ask(self, what: str = "") -> Asked:
        """The prompt; the answer is the baseline's."""
        asked = ask(self.engine, self.prompt, GENERATED_TOKENS)
        print(f"{what}: {asked}")
        said, expected = asked.answer.text, self.baseline.answer.text
        assert said == expected, f"{what}: {said!r} instead of {expected!r}"
        assert origin(asked.answer) == (PROMPT_TOKENS - asked.answer.pulled, 0), f"{what}: {asked}"
        return asked

    def ask_frozen(self, what: str, then: Callable[[], object] = lambda: None) -> Asked:
        """The prompt, whose load begins at a node that is stopped in the same moment; `then` happens during it."""

        def happen() -> None:
            wait_until(lambda: unread_bytes(self.node), 10, "a read that the node was stopped in")
            then()

        return self.ask_disturbed(what, self.freeze, happen)

    def ask_disturbed(self, what: str, harm: Callable[[], object], then: Callable[[], object]) -> Asked:
        """The prompt; its store comes to `harm` when it has promised and before the engine hears of it. `then`
        happens once it has heard."""
        self.forwarder.on_reply(b"Resident", harm)

        def happen() -> None:
            assert self.forwarder.seen.wait(60), "nothing was promised"
            then()

        with ThreadPoolExecutor(1) as beside:
            happened = beside.submit(happen)
            asked = self.ask(what)
            happened.result()
        assert (asked.promised, asked.lost) == (CHUNK_TOKENS, CHUNK_TOKENS), "the load was not disturbed"
        self.assert_in_time(asked, LOOKUP_TIMEOUT_S + LOAD_TIMEOUT_S)  # each has its own deadline
        return asked

    def assert_in_time(self, asked: Asked, deadline_s: float) -> None:
        """Recomputing began within the deadline, half a second, and a step of the engine."""
        latest_s = deadline_s + MARGIN_S + self.step_s
        assert asked.waited_s < latest_s, (
            f"{asked}, with a deadline of {deadline_s} s, steps of {self.step_s:.1f} s"
        )

    def assert_no_step_waited(self) -> None:
        """No step of the engine has spent longer in the connector since the start, in scheduler or worker."""
        steps = self.engine.metric("vllm:kvstore_seconds_count", stage="step")
        short = self.engine.metric("vllm:kvstore_seconds_bucket", stage="step", le=str(STEP_MAX_S))
        assert steps > 0, "nothing was measured"
        assert short == steps, (
            f"{steps - short:.0f} of {steps:.0f} steps spent more than {STEP_MAX_S} s in the connector"
        )

    def assert_hits(self, what: str) -> None:
        """Hits come back by themselves."""
        began = time.monotonic()
        for number in range(1, ASKS_MAX + 1):
            wait_until(lambda: stored(self.node) in {0, OBJECTS}, 30, "no push to be under way")
            if self.ask(what).answer.pulled == CHUNK_TOKENS:
                print(f"{what}: hits after {time.monotonic() - began:.1f} s, at request {number}")
                return
        raise AssertionError(f"no hit in {ASKS_MAX} requests")


def origin(answer: Answer) -> tuple[int, int]:
    """Prompt tokens that were computed, and those that were in the engine."""
    return answer.computed, answer.local


@contextlib.contextmanager
def set_up(
    model: Path, repository: Path, logs: Path, start: Callable[[str], Node], node: str, **settings: object
) -> Iterator[Stage]:
    """The engine is started when no store is there, and computes the baseline so. It remembers nothing itself.

    Args:
        model, repository, logs: folders.
        start: see `Stage`.
        node: "host:port" of the store that will be.
        settings: more of the connector's.
    """
    prompt = prompt_text(repository, "tides")
    with contextlib.ExitStack() as exits:
        forwarder = exits.enter_context(Forwarder(node))
        times = {"load_timeout_s": LOAD_TIMEOUT_S, "lookup_timeout_s": LOOKUP_TIMEOUT_S}
        # By shared memory a load would not notice that its node is stopped or that a network is cut.
        config = transfer_config(forwarder.address, transfer="mooncake", **times, **settings)
        flags = ["--no-enable-prefix-caching"]  # whatever it is asked, the store is asked
        engine = Engine("engine", model, free_port(), logs, store=config, flags=flags)
        exits.callback(engine.stop)
        engine.wait_ready()
        ask(engine, "Only to wake the engine up.", 2)
        baseline = ask(engine, prompt, GENERATED_TOKENS)
        assert origin(baseline.answer) == (PROMPT_TOKENS, 0), "it was computed where there was no store"
        stage = Stage(engine, forwarder, prompt, baseline, start)
        exits.callback(lambda: [made.stop() for made in stage.nodes])
        yield stage


@contextlib.contextmanager
def on_loopback(model: Path, repository: Path, logs: Path) -> Iterator[tuple[Stage, RedisServer]]:
    """A stage whose nodes run on this host, with a Redis of their own."""
    ports = free_port(), free_port()
    with RedisServer(logs) as redis:
        flags = ("--redis-url", redis.url)

        def start(name: str) -> Node:
            return Node(*ports, logs, name=name, flags=flags)

        with set_up(model, repository, logs, start, f"127.0.0.1:{ports[0]}") as stage:
            yield stage, redis


class Chatter:
    """Another request that goes on generating; `gaps` are the times between its tokens: the engine's steps."""

    def __init__(self, engine: Engine, tokens: int = 3_000) -> None:
        self._times = [time.monotonic()]
        self._body = {
            "model": MODEL_NAME,
            "prompt": "Tell me a long story.",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._url = f"{engine.url}/v1/completions"
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def _listen(self) -> None:
        gone = contextlib.suppress(httpx.TransportError)  # a test that fails stops the engine
        with gone, httpx.stream("POST", self._url, json=self._body, timeout=300) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {") and json.loads(line.removeprefix("data: ")).get("choices"):
                    self._times.append(time.monotonic())
                if self._enough.is_set():
                    return

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between tokens that came in this time."""
        times = [at for at in self._times if since <= at <= until]
        return [after - before for before, after in itertools.pairwise(times)]

    def __enter__(self) -> "Chatter":
        self._thread.start()
        wait_until(lambda: len(self._times) > 10, 300, "tokens to come")
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()
