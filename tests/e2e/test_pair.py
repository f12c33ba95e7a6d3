"""A prefill and a decode engine behind a proxy. The decode engine keeps no prefixes, so it always asks
the store: one that always misses fails at the lengths and in the race.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.trials import RECOMPUTED_MAX, hand_over, pass_cancellations, pass_lengths, race

pytestmark = pytest.mark.e2e

LENGTHS = (1, 128, 257, 511)  # the long tests have more


@pytest.fixture(scope="module")
def fleet(model_path: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("pair")
    settings = {"transfer": "mooncake", "write_back": True}  # as between machines
    names = ("prefill", "decode")
    with running_fleet(model_path, repository, logs, names, ("decode",), **settings) as running:
        yield running


def test_at_most_one_engine_block_is_computed_again_whatever_the_length(fleet: Fleet) -> None:
    fleet.ensure_up()
    proxy = fleet.proxy(["prefill"], ["decode"])
    pass_lengths(fleet, proxy, fleet.engines["decode"], LENGTHS)


def test_clients_that_go_leave_nothing_behind(fleet: Fleet) -> None:
    fleet.ensure_up()
    proxy = fleet.proxy(["prefill"], ["decode"])
    pass_cancellations(fleet, proxy, fleet.engines["decode"], 16)


def test_decode_that_is_asked_before_prefill_has_finished_waits_for_it(fleet: Fleet) -> None:
    fleet.ensure_up()
    raced = race(fleet, "prefill", fleet.engines["decode"], early_s=0.5, kill=False)
    print(raced)
    assert raced.pulled


def test_an_answer_goes_on_when_its_engine_is_killed(fleet: Fleet) -> None:
    fleet.ensure_up()
    proxy = fleet.proxy(["prefill"], ["decode", "prefill"])
    over = hand_over(fleet, proxy, ["decode", "prefill"], random.Random(1), 48)
    print(over)
    assert over.computed <= RECOMPUTED_MAX
    assert proxy.metric("kvstore_proxy_hand_overs_total", outcome="continued") == 1
