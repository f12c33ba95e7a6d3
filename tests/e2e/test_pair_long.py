"""The same as `test_pair.py` in long rounds, with the numbers that the project promises; only by hand: `make soak`.

A quarter of an hour. Engines that were killed come back on their ports, as a supervisor would have it, while others
go on.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.trials import (
    RECOMPUTED_MAX,
    HandOver,
    Raced,
    hand_over,
    pass_cancellations,
    pass_lengths,
    race,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3_000)]

LENGTHS = (1, 127, 128, 129, 255, 256, 257, 383, 511, 513)
CANCELLED = 200
RACES, RACES_PULLED_SHARE = 30, 0.9
EARLY_S_MAX = 0.5
HANDOFF_WAIT_S = 5.0
HAND_OVERS, GENERATED_TOKENS = 20, 64
ALL = (
    "one",
    "two",
    "three",
)  # each is prefill and decode, and keeps no prefixes: what it does not compute it pulls


@pytest.fixture(scope="module")
def fleet(model_path: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("pair")
    settings = {"transfer": "mooncake", "write_back": True, "handoff_wait_s": HANDOFF_WAIT_S}
    with running_fleet(model_path, repository, logs, ALL, ALL, **settings) as running:
        yield running


def test_at_most_one_engine_block_is_computed_again_whatever_the_length(fleet: Fleet) -> None:
    fleet.ensure_up()
    pass_lengths(fleet, fleet.proxy(ALL[1:], ALL[:1]), fleet.engines[ALL[0]], LENGTHS)


def test_clients_that_go_leave_nothing_behind(fleet: Fleet) -> None:
    fleet.ensure_up()
    pass_cancellations(fleet, fleet.proxy(ALL[1:], ALL[:1]), fleet.engines[ALL[0]], CANCELLED)


def test_decode_that_is_asked_before_prefill_has_finished_waits_for_it(fleet: Fleet) -> None:
    """In a third of the runs prefill is killed meanwhile; another one takes its place until it is back."""
    fleet.ensure_up()
    prefill, decode, rng = ALL[1:], fleet.engines[ALL[0]], random.Random(2)
    races: list[Raced] = []
    for number in range(RACES):
        name, kill = fleet.up(prefill)[0], number % 3 == 2
        races.append(race(fleet, name, decode, rng.uniform(0, EARLY_S_MAX), kill=kill))
        print(races[-1])
        if kill:
            fleet.start(name)
    survived = [each for each in races if not each.killed]
    assert any(each.early_s > 0 and each.pulled for each in survived), "decode was always asked too late"
    assert sum(each.pulled for each in survived) >= RACES_PULLED_SHARE * len(survived)
    assert all(each.waited_s < HANDOFF_WAIT_S + 1.5 for each in races), "a wait without a bound"
    assert any(not each.pulled for each in races), "prefill was never killed in time"
    fleet.ensure_up()
    fleet.wait_for_nothing_left(120)


def test_an_answer_goes_on_when_its_engine_is_killed(fleet: Fleet) -> None:
    fleet.ensure_up()
    proxy, rng = fleet.proxy(ALL, ALL), random.Random(1)
    overs: list[HandOver] = []
    for _ in range(HAND_OVERS):
        overs.append(hand_over(fleet, proxy, ALL, rng, GENERATED_TOKENS))
        print(overs[-1])
        fleet.start(overs[-1].died)
    assert proxy.metric("kvstore_proxy_hand_overs_total", outcome="continued") == HAND_OVERS
    assert max(over.computed for over in overs) <= RECOMPUTED_MAX
    fleet.ensure_up()
    fleet.wait_for_nothing_left(120)
