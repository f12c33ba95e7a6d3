"""The same as `test_pair.py` in long rounds, with the numbers that the project promises; only by hand: `make soak`.

Half an hour. Engines that were killed come back on their ports, as a supervisor would have it.
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
DECODE = ("decode-1", "decode-2")


@pytest.fixture(scope="module")
def fleet(model_path: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("pair")
    names = ("prefill", *DECODE)
    settings = {"transfer": "mooncake", "write_back": True, "handoff_wait_s": HANDOFF_WAIT_S}
    with running_fleet(model_path, repository, logs, names, DECODE, **settings) as running:
        yield running


def test_at_most_one_engine_block_is_computed_again_whatever_the_length(fleet: Fleet) -> None:
    fleet.ensure_up()
    pass_lengths(fleet, fleet.proxy(["prefill"], DECODE[:1]), fleet.engines[DECODE[0]], LENGTHS)


def test_clients_that_go_leave_nothing_behind(fleet: Fleet) -> None:
    fleet.ensure_up()
    pass_cancellations(fleet, fleet.proxy(["prefill"], DECODE[:1]), fleet.engines[DECODE[0]], CANCELLED)


def test_decode_that_is_asked_before_prefill_has_finished_waits_for_it(fleet: Fleet) -> None:
    """In a third of the runs prefill is killed meanwhile."""
    fleet.ensure_up()
    decode, rng = fleet.engines[DECODE[0]], random.Random(2)
    races: list[Raced] = []
    for number in range(RACES):
        kill = number % 3 == 2
        races.append(race(fleet, "prefill", decode, rng.uniform(0, EARLY_S_MAX), kill=kill))
        print(races[-1])
        if kill:
            fleet.restart("prefill")
    survived = [each for each in races if not each.killed]
    assert sum(each.pulled for each in survived) >= RACES_PULLED_SHARE * len(survived)
    assert all(each.waited_s < HANDOFF_WAIT_S + 1.5 for each in races), "a wait without a bound"
    assert any(not each.pulled for each in races), "prefill was never killed in time"
    fleet.wait_for_nothing_left(120)


def test_an_answer_goes_on_when_its_engine_is_killed(fleet: Fleet) -> None:
    fleet.ensure_up()
    proxy, rng = fleet.proxy(["prefill"], DECODE), random.Random(1)
    overs: list[HandOver] = []
    for _ in range(HAND_OVERS):
        overs.append(hand_over(fleet, proxy, DECODE, rng, GENERATED_TOKENS))
        print(overs[-1])
        fleet.restart(overs[-1].died)
    assert proxy.metric("kvstore_proxy_hand_overs_total", outcome="continued") == HAND_OVERS
    assert max(over.computed for over in overs) <= RECOMPUTED_MAX
    fleet.wait_for_nothing_left(120)
