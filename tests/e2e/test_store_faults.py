"""One engine outlives whatever becomes of its store: the same tokens, no restart, and hits again by themselves.

The baseline is computed by the same engine: a prompt under a cache salt of its own has keys of its own. A fault
hits a load in flight by construction: `Forwarder.on_reply` sees the node's promise come back and stops the node
before it passes the promise on, so that the load begins and cannot end. It is proved by what the stopped node has
not read at its Mooncake port, and by vLLM's own counters: tokens were promised to a load, and did not come. A store
that always misses fails there, and at every `assert_hits`.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.demo.engine import Answer, Engine
from deploy.demo.node import Node
from tests.e2e.support import (
    Asked,
    Forwarder,
    ask,
    prompt_text,
    stored,
    transfer_config,
    unread_bytes,
    wait_for_nothing_held,
)
from tests.support import RedisServer, free_port, wait_until

pytestmark = pytest.mark.e2e

GENERATED_TOKENS = 16
PROMPT_TOKENS, CHUNK_TOKENS, OBJECTS = 639, 512, 2
LOAD_TIMEOUT_S = 3.0
LOOKUP_TIMEOUT_S = 1.0
MARGIN_S = 0.5  # beyond its deadline and recomputing
SLACK = 2.0  # how much longer the same computation may take on a machine that others use as well
ASKS_MAX = 12  # until hits are back; each is computed whole meanwhile


@dataclass
class Stage:
    """A store that can be harmed, and the one engine that must not notice."""

    engine: Engine
    nodes: list[Node]
    forwarder: Forwarder
    redis: RedisServer
    prompt: str
    logs: Path
    ports: tuple[int, int]
    baseline: Asked

    def ask(self, **more: str) -> Asked:
        """The prompt, which the engine does not remember."""
        self.engine.forget_local_prefixes()
        asked = ask(self.engine, self.prompt, GENERATED_TOKENS, **more)
        print(asked)
        assert asked.answer.text == self.baseline.answer.text
        assert origin(asked.answer) == (PROMPT_TOKENS - asked.answer.pulled, 0)
        return asked

    @property
    def node(self) -> Node:
        """The boot that was started last."""
        return self.nodes[-1]

    def start_node(self) -> None:
        """A new boot on the same ports."""
        flags = ("--redis-url", self.redis.url)
        self.nodes.append(Node(*self.ports, self.logs, name=f"node-{len(self.nodes)}", flags=flags))

    def restart_node(self) -> None:
        """SIGKILL, and a new boot at once."""
        self.node.kill()
        self.start_node()

    def disturbed(self, deadline_s: float, then: Callable[[], object] = lambda: None) -> Asked:
        """The prompt, whose load begins at a node that was stopped in the same moment; `then` happens during it."""
        self.forwarder.on_reply(b"Resident", lambda: self.node.signal(signal.SIGSTOP))

        def happen() -> None:
            assert self.forwarder.seen.wait(60), "nothing was promised"
            wait_until(lambda: unread_bytes(self.node), 10, "a read that the node was stopped in")
            then()

        with ThreadPoolExecutor(1) as beside:
            happened = beside.submit(happen)
            asked = self.ask()
            happened.result()
        assert (asked.promised, asked.lost) == (CHUNK_TOKENS, CHUNK_TOKENS), "the load was not disturbed"
        self.assert_in_time(asked, deadline_s)
        return asked

    def assert_in_time(self, asked: Asked, deadline_s: float) -> None:
        """It came within its deadline and half a second of recomputing."""
        assert asked.took_s < SLACK * self.baseline.took_s + deadline_s + MARGIN_S

    def assert_hits(self) -> int:
        """Hits come back by themselves: after how many requests."""
        for number in range(1, ASKS_MAX + 1):
            wait_until(lambda: stored(self.node) in {0, OBJECTS}, 30, "no push to be under way")
            if self.ask().answer.pulled == CHUNK_TOKENS:
                return number
        raise AssertionError(f"no hit in {ASKS_MAX} requests")


def origin(answer: Answer) -> tuple[int, int]:
    """Prompt tokens that were computed, and those that were in the engine."""
    return answer.computed, answer.local


@pytest.fixture
def stage(model_path: Path, repository: Path, tmp_path: Path) -> Iterator[Stage]:
    """The engine is started when no store is there, and computes the baseline so."""
    prompt = prompt_text(repository, "tides")
    ports = free_port(), free_port()
    with contextlib.ExitStack() as exits:
        redis = exits.enter_context(RedisServer(tmp_path))
        forwarder = exits.enter_context(Forwarder(f"127.0.0.1:{ports[0]}"))
        config = transfer_config(forwarder.address, load_timeout_s=LOAD_TIMEOUT_S)
        engine = Engine("engine", model_path, free_port(), tmp_path, store=config)
        exits.callback(engine.stop)
        engine.wait_ready()
        ask(engine, "Only to wake the engine up.", 2)
        baseline = ask(engine, prompt, GENERATED_TOKENS, salt="baseline")
        assert origin(baseline.answer) == (PROMPT_TOKENS, 0), "it was computed where there was no store"
        made = Stage(engine, [], forwarder, redis, prompt, tmp_path, ports, baseline)
        yield made
        for node in made.nodes:
            node.stop()


def test_an_engine_outlives_its_store(stage: Stage) -> None:
    absent = stage.ask()
    stage.assert_in_time(absent, LOOKUP_TIMEOUT_S)
    stage.start_node()
    stage.node.wait_ready()
    stage.assert_hits()

    # frozen while it is being read from
    stage.disturbed(LOAD_TIMEOUT_S)
    stage.node.signal(signal.SIGCONT)
    stage.assert_hits()
    wait_for_nothing_held(stage.node, 60)

    # the index is gone, and stays away
    stage.redis.kill()
    assert stage.ask().answer.pulled == CHUNK_TOKENS
    stage.redis.restart()
    stage.assert_hits()

    # killed while it is being read from, and there again within a second, on the same ports
    stage.disturbed(LOAD_TIMEOUT_S, then=stage.restart_node)
    stage.node.wait_ready()
    stage.assert_hits()
    wait_for_nothing_held(stage.node, 60)
