"""No step of the engine waits for the store, whatever the store does: hooks take less than 100 ms, measured.

The engine's hooks run with the real client, and with a real mover; what they talk to hangs, answers late, or is not
there. What counts is time in the hook that is not spent waiting for a processor, so a busy machine changes nothing.

Mutants that were tried and are caught: an acquire or a reservation whose answer is waited for in the hook; a report
that waits to be sent; a worker half that pulls, or pushes, on the engine's thread.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from connector.config import Config
from connector.start import open_control
from kvstore.client import Mover
from tests.connector.rig import Rig
from tests.connector.support import CHUNK, Engine, Node, prompt
from tests.connector.test_worker import Gate, Hanging, chain, no_threads_left
from tests.support import RedisServer, wait_until
from tests.support.stopwatch import stopwatch

__all__ = ["no_threads_left"]

STEP_MAX_S = 0.1
HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups", "has_pending_push_work", "get_kv_connector_stats",
    "take_events", "get_external_cache_hit_sources",
)  # fmt: skip
WORKER_HOOKS = (
    "begin_saves", "start_load_kv", "get_transfer_results", "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)  # fmt: skip
TIMEOUT_S = 0.3


def watch(owner: Any, names: tuple[str, ...], took: dict[str, float]) -> None:
    """Measures every call of these methods; `took` has the longest of each."""

    def watched(name: str) -> Callable[..., Any]:
        hook = getattr(owner, name)

        @wraps(hook)
        def measured(*arguments: Any, **more: Any) -> Any:
            with stopwatch(lambda seconds: took.__setitem__(name, max(took.get(name, 0.0), seconds))):
                return hook(*arguments, **more)

        return measured

    for name in names:
        setattr(owner, name, watched(name))


class Silent:
    """Takes connections and whatever comes, and says nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.connections.append(self._listener.accept()[0])
            except OSError:  # closed: the test is over
                return

    def close(self) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.close()


@contextmanager
def served(took: dict[str, float], node: str, redis: str = "", *, load: bool = True) -> Iterator[Engine]:
    """An engine with the real client; every hook is measured."""
    settings: dict[str, Any] = {
        "request_timeout_s": TIMEOUT_S,
        "lookup_timeout_s": TIMEOUT_S,
        "handoff_wait_s": TIMEOUT_S,
    }
    control = open_control(Config(node=node, redis=redis, **settings), whole_objects=True)
    engine = Engine(Node(), control=control, load=load, **settings)
    watch(engine.connector, HOOKS, took)
    try:
        yield engine
    finally:
        control.close()


def serve(engine: Engine, requests: int = 6) -> None:
    """Requests come to their end; those that wait for an answer are stepped past as vLLM does."""
    for number in range(requests):
        engine.submit(f"r{number}", prompt(number, 3 * CHUNK), max_tokens=3)

    def step() -> bool:
        if engine.scheduler.has_requests():
            engine.step()
        return all(len(engine.tokens[f"r{number}"]) == 3 for number in range(requests))

    wait_until(step, 20, "all requests to be answered")
    assert not engine.half.breaker.errors


def assert_none_waited(took: dict[str, float], *names: str) -> None:
    assert set(names) <= set(took), "hooks that were never called"
    assert max(took.values()) < STEP_MAX_S, {name: round(seconds, 4) for name, seconds in took.items()}


SERVED = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "build_connector_meta",
    "request_finished_all_groups",
)


@pytest.mark.parametrize("load", [True, False])
def test_a_node_that_takes_everything_and_answers_nothing(silent: Silent, load: bool) -> None:
    took: dict[str, float] = {}
    with served(took, silent.address, load=load) as engine:
        serve(engine)
        stats = engine.half.shared.stats

        def told() -> bool:
            if engine.scheduler.has_requests():  # saves that nobody answers
                engine.step()
            return bool(stats.misses if load else stats.dropped)

        wait_until(told, 10, "the time to be up")
        assert silent.connections, "nobody was asked"
    assert_none_waited(took, *SERVED)


def test_nobody_is_there() -> None:
    took: dict[str, float] = {}
    with served(took, "127.0.0.1:9") as engine:
        serve(engine)
    assert_none_waited(took, *SERVED)


def test_a_redis_that_hangs(silent: Silent, tmp_path: Path) -> None:
    took: dict[str, float] = {}
    with RedisServer(tmp_path) as redis:
        redis.pause()
        with served(took, silent.address, redis.url) as engine:
            serve(engine)
        redis.resume()
    assert_none_waited(took, *SERVED)


@pytest.mark.parametrize("question", ["acquire", "reserve"])
def test_a_bug_that_waits_would_be_seen(
    silent: Silent, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measure itself: the same engine, with a question whose answer is waited for."""
    took: dict[str, float] = {}
    with served(took, silent.address, load=question == "acquire") as engine:
        control = engine.half.shared.control
        ask = getattr(control, question)

        def patient(*arguments: Any, **more: Any) -> Any:
            future = ask(*arguments, **more)
            future.exception(10)
            return future

        monkeypatch.setattr(control, question, patient)
        serve(engine, 2)
    assert max(took.values()) > STEP_MAX_S


class HangingPush(Hanging):
    """Pushes hang as well."""

    def push(self, *arguments: Any) -> Any:
        self._gate.pass_through()
        return self._mover.push(*arguments)


def test_a_worker_whose_transfers_hang() -> None:
    """Many jobs, more than there are threads; all of them are over their deadline in the end."""
    gate = Gate()
    took: dict[str, float] = {}

    def wrap(mover: Mover) -> Any:
        return HangingPush(mover, gate)

    rig = Rig(wrap=wrap)
    watch(rig.worker, WORKER_HOOKS, took)
    objects = chain(rig, rig.random_objects(2))
    jobs = [rig.load_job(objects, f"r{number}") for number in range(8)]
    saves = [rig.save_job([(5, 9), (6, 3)]) for _ in range(8)]
    rig.step(*jobs, *saves)
    assert gate.reached.wait(10)
    for _ in range(50):
        rig.step()
    rig.clock.now += 60.0
    wait_until(
        lambda: len(rig.reported(rig.step())) == len(jobs) + len(saves), 10, "every job to be given up"
    )
    gate.opened.set()
    assert_none_waited(took, *WORKER_HOOKS)
