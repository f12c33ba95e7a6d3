"""The circuit breaker, in virtual time."""

import random

import pytest

from kvstore.client import Breaker, BreakerState


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock) -> Breaker:
    return Breaker(clock, random.Random(1), failures_max=3, probe_s=1.0, probe_s_max=8.0)


def opened(breaker: Breaker) -> Breaker:
    while breaker.closed:
        breaker.failure()
    return breaker


def wait_for_probe(breaker: Breaker, clock: Clock) -> float:
    """Seconds until a probe was due."""
    start = clock.now_s
    while not breaker.begin_probe():
        clock.now_s += 0.01
    return clock.now_s - start


def test_it_opens_only_after_failures_in_a_row(breaker) -> None:
    """Mutant: count failures without forgetting them at a success."""
    for _ in range(10):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.closed
    assert breaker.opened_total == 0
    opened(breaker)
    assert breaker.opened_total == 1


def test_exactly_one_probe_is_given_out(breaker, clock) -> None:
    opened(breaker)
    assert not breaker.begin_probe(), "too early"
    clock.now_s += 1.25
    assert breaker.begin_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.begin_probe()
    assert not breaker.closed, "calls wait for the probe's outcome"


def test_a_probe_that_succeeds_closes_it(breaker, clock) -> None:
    wait_for_probe(opened(breaker), clock)
    breaker.success()
    assert breaker.closed
    breaker.failure()
    assert breaker.closed, "it starts counting anew"


def test_probes_that_fail_come_ever_later_up_to_a_bound(breaker, clock) -> None:
    opened(breaker)
    waits = []
    for _ in range(6):
        waits.append(wait_for_probe(breaker, clock))
        breaker.failure()
    for wait, expected in zip(waits, [1, 2, 4, 8, 8, 8], strict=True):
        assert 0.75 * expected - 0.01 <= wait <= 1.25 * expected + 0.01
    assert breaker.opened_total == 1, "it has been open all the time"


def test_after_it_has_closed_the_next_probe_comes_soon_again(breaker, clock) -> None:
    opened(breaker)
    for _ in range(5):
        wait_for_probe(breaker, clock)
        breaker.failure()
    wait_for_probe(breaker, clock)
    breaker.success()
    assert wait_for_probe(opened(breaker), clock) <= 1.26


def test_late_failures_of_calls_under_way_do_not_put_off_the_probe(breaker, clock) -> None:
    """Mutant: every failure starts the wait again; under load the node would never be probed."""
    opened(breaker)
    clock.now_s += 0.7
    for _ in range(10):
        breaker.failure()
    assert wait_for_probe(breaker, clock) <= 0.6


def test_a_late_answer_closes_it(breaker) -> None:
    opened(breaker).success()
    assert breaker.closed


def test_clients_do_not_probe_in_step(clock) -> None:
    waits = set()
    for seed in range(5):
        start = clock.now_s
        waits.add(round(wait_for_probe(opened(Breaker(clock, random.Random(seed))), clock), 2))
        clock.now_s = start
    assert len(waits) > 2


def test_its_picture_says_how_it_stands(breaker) -> None:
    assert repr(opened(breaker)) == "<Breaker open, 3 failures, opened 1 times>"
