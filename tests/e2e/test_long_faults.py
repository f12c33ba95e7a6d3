"""Longer faults, and some that want a network of their own; see test_store_faults.py. By hand: `make soak`."""

import time
from pathlib import Path

import pytest

from deploy.demo.node import Node
from tests.e2e.network import HOST, NODE, Network
from tests.e2e.stage import CHUNK_TOKENS, LOAD_TIMEOUT_S, LOOKUP_TIMEOUT_S, Chatter, on_loopback, set_up
from tests.e2e.support import wait_for_nothing_held
from tests.support import free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OUTAGE_S = 20.0
STALL_S = 0.9  # a step that waits for one of the time-outs of the store takes longer


def test_a_store_that_is_frozen_for_20_s(model_path: Path, repository: Path, tmp_path: Path) -> None:
    """Requests that come meanwhile are in time as well, and no step of the engine waits."""
    with on_loopback(model_path, repository, tmp_path) as (stage, _):
        stage.start_node()
        stage.node.wait_ready()
        stage.assert_hits("start")
        with Chatter(stage.engine) as chatter:
            began = time.monotonic()
            stage.ask("not frozen")
            normal = chatter.gaps(began - 1, time.monotonic())
            stage.step_s = max(normal)
            frozen = time.monotonic()
            stage.ask_frozen("frozen during a load")
            while time.monotonic() < frozen + OUTAGE_S:
                stage.assert_in_time(stage.ask("still frozen"), LOOKUP_TIMEOUT_S)
            stage.thaw()
            loading = chatter.gaps(frozen, frozen + LOAD_TIMEOUT_S)
        stage.assert_hits("thawed")
        wait_for_nothing_held(stage.node, 60)
        stage.assert_no_step_waited()
        print(f"longest step: {max(normal):.3f} s normally, {max(loading):.3f} s while a load was stuck")
        assert max(loading) < max(STALL_S, *normal)


def test_packets_are_dropped_and_not_refused(model_path: Path, repository: Path, tmp_path: Path) -> None:
    ports = free_port(), free_port()

    with Network() as network:

        def start(name: str) -> Node:
            return Node(*ports, tmp_path, name=name, host=NODE, within=network.within, flags=("--insecure",))

        with set_up(model_path, repository, tmp_path, start, f"{NODE}:{ports[0]}", host=HOST) as stage:
            stage.start_node()
            stage.node.wait_ready()
            stage.assert_hits("start")
            for outage_s in (0.0, OUTAGE_S):
                lost = time.monotonic()
                stage.ask_disturbed("packets lost during a load", network.lose, lambda: None)
                while time.monotonic() < lost + outage_s:
                    stage.assert_in_time(stage.ask("still lost"), LOOKUP_TIMEOUT_S)
                network.heal()
                stage.assert_hits("healed")
                wait_for_nothing_held(stage.node, 120)
            stage.assert_no_step_waited()


def test_killed_again_and_again(model_path: Path, repository: Path, tmp_path: Path) -> None:
    """Ten boots of the store, each killed in a load."""
    with on_loopback(model_path, repository, tmp_path) as (stage, _):
        stage.start_node()
        for _ in range(10):
            stage.node.wait_ready()
            stage.assert_hits("up")
            stage.ask_frozen("killed during a load", then=stage.restart_node)
        stage.node.wait_ready()
        stage.assert_hits("up")
        wait_for_nothing_held(stage.node, 60)
        stage.assert_no_step_waited()


def test_a_redis_that_does_not_answer_costs_no_hit_of_the_own_node(
    model_path: Path, repository: Path, tmp_path: Path
) -> None:
    """Mutant that was seen: the index's time-out as long as a request may be held back for."""
    with on_loopback(model_path, repository, tmp_path) as (stage, redis):
        stage.start_node()
        stage.node.wait_ready()
        stage.assert_hits("up")
        redis.pause()
        wait_until(lambda: stage.node.gauge("kvstore_index_up") == 0, 30, "the node to miss its Redis")
        for _ in range(6):
            asked = stage.ask("Redis frozen")
            assert asked.answer.pulled == CHUNK_TOKENS
            stage.assert_in_time(asked, LOOKUP_TIMEOUT_S)
        redis.resume()
        redis.flush()
        stage.assert_hits("Redis flushed")
        wait_for_nothing_held(stage.node, 60)
        stage.assert_no_step_waited()
