"""Load or compute: the model alone, in virtual time; test_cost_in_the_scheduler.py has it in vLLM's scheduler.

Mutants: arithmetic instead of geometric steps (a fast link is never noticed again); the first pull counted; an
unknown rate taken for slow; no probes, or one for every request; the gain of the whole promise instead of the best
prefix.
"""

from random import Random

import pytest

from connector.cost import (
    PROBE_EVERY,
    PROBE_OBJECTS,
    PULLS_MIN,
    TRIAL_AFTER_LOADS,
    Cost,
    Decision,
    LoadPolicy,
    Offer,
    Place,
    Verdict,
)
from connector.steps import Prefilled, Steps
from kvstore.client import NodeId
from kvstore.core import Tier

ONE, TWO = NodeId(b"node-one"), NodeId(b"node-two")
TOKENS, SIZE = 256, 32 << 20
PREFILL = 5_000.0  # tokens a second
EVEN = SIZE / (TOKENS / PREFILL)  # bytes a second with which loading takes as long as computing


def offers(count: int, tier: Tier = Tier.DRAM, node: NodeId = ONE, eta_s: float = 0.0) -> list[Offer]:
    return [Offer(TOKENS, SIZE, node, tier, eta_s) for _ in range(count)]


def measured(rates: dict[Place, float], prefill: float | None = PREFILL) -> Cost:
    """A cost that has seen these bytes per second."""
    cost = Cost()
    for place, rate in rates.items():
        for _ in range(1 + PULLS_MIN):
            cost.pulled(place, SIZE, SIZE / rate)
    if prefill:
        cost.prefilled(2_048, 2_048 / prefill)
    return cost


class Engine:
    """Requests one after the other, each with a stored prompt of `chunks` chunks, over a link of this speed."""

    def __init__(self, cost: Cost, rate: float, chunks: int = 8, noise: float = 1.0) -> None:
        self.cost, self.rate, self.chunks = cost, rate, chunks
        self.random, self.noise = Random(7), noise
        self.verdicts: list[Verdict] = []

    def run(self, requests: int) -> list[Verdict]:
        """What was decided for each."""
        start = len(self.verdicts)
        for _ in range(requests):
            verdict = self.cost.decide(offers(self.chunks))
            self.verdicts.append(verdict)
            factor = self.noise ** self.random.uniform(-1, 1)
            if verdict.num_objects:
                size = verdict.num_objects * SIZE
                self.cost.pulled(Place(ONE, Tier.DRAM), size, size / self.rate * factor)
            if rest := (self.chunks - verdict.num_objects) * TOKENS:
                self.cost.prefilled(rest, rest / PREFILL * factor)
        return self.verdicts[start:]


def loads(verdicts: list[Verdict], chunks: int = 8) -> float:
    """The share that was loaded in full."""
    return sum(one.num_objects == chunks for one in verdicts) / len(verdicts)


def probes(verdicts: list[Verdict]) -> float:
    return sum(one.decision is Decision.PROBE for one in verdicts) / len(verdicts)


@pytest.mark.parametrize("noise", [1.0, 2.0])
@pytest.mark.parametrize("knows_prefill", [True, False])
def test_a_link_ten_times_slower_than_computing_is_not_used_after_twenty_requests(
    noise, knows_prefill
) -> None:
    engine = Engine(measured({}, PREFILL if knows_prefill else None), EVEN / 10, noise=noise)
    engine.run(20)
    after = engine.run(1_000)
    assert sum(one.num_objects == 0 for one in after) >= 0.95 * len(after)
    assert 0 < probes(engine.verdicts) < 0.02


@pytest.mark.parametrize("noise", [1.0, 2.0])
def test_a_link_ten_times_faster_is_always_used_and_never_probed(noise) -> None:
    engine = Engine(measured({}), EVEN * 10, noise=noise)
    engine.run(20)
    assert loads(engine.run(1_000)) >= 0.95
    assert engine.cost.decisions[Decision.PROBE] == 0


def test_an_engine_that_finds_everything_stored_computes_once_to_learn_what_it_costs() -> None:
    engine = Engine(measured({}, None), EVEN * 10)
    verdicts = engine.run(500)
    assert [one for one in verdicts if one.decision is Decision.PROBE] == [Verdict(0, Decision.PROBE)]
    assert loads(verdicts) >= 0.99
    assert verdicts.index(Verdict(0, Decision.PROBE)) <= TRIAL_AFTER_LOADS + 1


def test_long_requests_are_not_computed_to_learn() -> None:
    engine = Engine(measured({}, None), EVEN / 10, chunks=20)
    assert loads(engine.run(50), chunks=20) == 1.0


def test_a_link_that_recovers_is_noticed_by_a_probe() -> None:
    engine = Engine(measured({}), EVEN / 10)
    engine.run(100)
    engine.rate = EVEN * 10
    back = engine.run(2 * PROBE_EVERY)
    assert loads(back[PROBE_EVERY:]) >= 0.95
    assert loads(engine.run(1_000)) >= 0.99


def test_a_link_that_becomes_slow_is_noticed_within_a_few_requests() -> None:
    engine = Engine(measured({}), EVEN * 10)
    engine.run(100)
    engine.rate = EVEN / 10
    assert sum(one.num_objects > 0 for one in engine.run(50)) <= 6


def test_one_hiccup_does_not_turn_a_fast_link_into_a_slow_one() -> None:
    """Mutant: a plain mean. A pull that took ten seconds would stop loads for the next hundred requests."""
    engine = Engine(measured({}), EVEN * 10)
    engine.run(20)
    engine.cost.pulled(Place(ONE, Tier.DRAM), SIZE, 10.0)
    assert loads(engine.run(100)) == 1.0


def test_the_first_pull_from_a_node_is_not_counted() -> None:
    cost = measured({}, PREFILL)
    cost.pulled(Place(ONE, Tier.DRAM), SIZE, 3.0)  # connections are opened
    assert cost.numbers.pull_bytes_per_s == {}
    assert cost.decide(offers(4)).num_objects == 4
    cost.pulled(Place(ONE, Tier.DRAM), SIZE, SIZE / (EVEN * 10))
    assert cost.numbers.pull_bytes_per_s[ONE.hex(), "dram"] == pytest.approx(EVEN * 10)


def test_a_slow_start_is_not_taken_for_a_slow_link() -> None:
    """A node that stood still while its second load was under way. Mutant: the first sample decides."""
    cost = measured({}, PREFILL)
    for seconds in (0.01, 10.0, 0.01, 0.01, 0.01):
        assert cost.decide(offers(4)).num_objects == 4
        cost.pulled(Place(ONE, Tier.DRAM), 4 * SIZE, 4 * seconds)
    assert cost.decide(offers(4)).num_objects == 4


def test_what_lies_in_the_faster_tier_is_loaded_and_the_rest_computed() -> None:
    cost = measured({Place(ONE, Tier.DRAM): EVEN * 10, Place(ONE, Tier.NVME): EVEN / 3})
    mixed = [*offers(3), *offers(5, Tier.NVME)]
    assert cost.decide(mixed).num_objects == 3
    assert cost.numbers.decisions == {Decision.CUT: 1}
    fast = measured({Place(ONE, Tier.DRAM): EVEN * 10, Place(ONE, Tier.NVME): EVEN * 2})
    assert fast.decide(mixed).num_objects == 8


def test_a_slow_node_does_not_hold_a_fast_one_back() -> None:
    cost = measured({Place(ONE, Tier.DRAM): EVEN * 10, Place(TWO, Tier.DRAM): EVEN / 10})
    assert cost.decide([*offers(4), *offers(2, node=TWO)]).num_objects == 4
    assert cost.decide(offers(4, node=TWO)).num_objects == 0
    assert cost.decide(offers(4)).num_objects == 4


def test_nodes_are_read_at_the_same_time() -> None:
    cost = measured({Place(ONE, Tier.DRAM): EVEN * 0.8, Place(TWO, Tier.DRAM): EVEN * 0.8})
    assert cost.decide(offers(8)).num_objects == 0
    assert cost.decide([*offers(4), *offers(4, node=TWO)]).num_objects == 8


def test_a_node_s_own_word_on_its_queue_counts() -> None:
    """NVMe is fast, but a hundred others wait for it."""
    cost = measured({Place(ONE, Tier.NVME): EVEN * 10})
    assert cost.decide(offers(8, Tier.NVME, eta_s=0.1)).num_objects == 8
    assert cost.decide(offers(8, Tier.NVME, eta_s=9.0)).num_objects == 0


def test_a_probe_loads_a_little_of_what_is_too_slow() -> None:
    cost = measured({Place(ONE, Tier.DRAM): EVEN * 10, Place(ONE, Tier.NVME): EVEN / 10})
    mixed = [*offers(3), *offers(9, Tier.NVME)]
    verdicts = [cost.decide(mixed) for _ in range(10 * PROBE_EVERY)]
    assert set(verdicts) == {Verdict(3, Decision.CUT), Verdict(3 + PROBE_OBJECTS, Decision.PROBE)}
    assert sum(one.decision is Decision.PROBE for one in verdicts) == 10
    assert cost.numbers.decisions == {Decision.CUT: 990, Decision.PROBE: 10}


@pytest.mark.parametrize(("policy", "expected"), [(LoadPolicy.ALWAYS, 4), (LoadPolicy.NEVER, 0)])
def test_the_user_may_decide(policy, expected) -> None:
    for rate in (EVEN * 10, EVEN / 10):
        cost = Cost(policy)
        for _ in range(1 + PULLS_MIN):
            cost.pulled(Place(ONE, Tier.DRAM), SIZE, SIZE / rate)
        cost.prefilled(1_024, 1_024 / PREFILL)
        assert {cost.decide(offers(4)).num_objects for _ in range(2 * PROBE_EVERY)} == {expected}


def test_small_steps_say_nothing_about_the_rate() -> None:
    cost = measured({}, None)
    cost.prefilled(40, 0.02)
    assert cost.numbers.prefill_tokens_per_s is None


# --- steps --------------------------------------------------------------------------------------------


def step(steps: Steps, began: float, ended: float, *tokens: int) -> Prefilled | None:
    steps.begin(began, {f"r{n}": count for n, count in enumerate(tokens)}, {})
    return steps.end(ended)


@pytest.fixture
def steps() -> Steps:
    """After the first step with prefill, which is not told."""
    steps = Steps()
    assert step(steps, 0.0, 5.0, 512) is None
    return steps


def test_a_step_of_prefill_is_told_with_its_time(steps) -> None:
    assert step(steps, 6.0, 6.5, 512, 400) == Prefilled(912, 0.5)


def test_steps_with_much_else_are_not_told(steps) -> None:
    """Mutant: prefill tokens over the time of a step that decoded for a hundred others."""
    assert step(steps, 6.0, 6.5, 64, *[1] * 100) is None
    assert step(steps, 7.0, 7.5, *[1] * 4) is None
    assert step(steps, 8.0, 8.5, 900, *[1] * 30) == Prefilled(900, 0.5)
    steps.begin(9.0, {"drafted": 6, "other": 1}, {"drafted": [1] * 5})
    assert steps.end(9.1) is None


def test_the_time_between_steps_of_an_idle_engine_is_not_counted(steps) -> None:
    assert step(steps, 100.0, 100.5, 512) == Prefilled(512, 0.5)


def test_steps_scheduled_ahead_are_told_with_their_own_time(steps) -> None:
    """The second is scheduled while the first runs. Mutant: from its scheduling on."""
    steps.begin(10.0, {"a": 512}, {})
    steps.begin(10.1, {"a": 256}, {})
    assert steps.end(11.0) == Prefilled(512, 1.0)
    assert steps.end(11.5) == Prefilled(256, 0.5)


def test_steps_that_ended_unseen_are_forgotten(steps) -> None:
    for number in range(1_000):
        steps.begin(float(number), {"a": 1}, {})
    assert len(steps._under_way) <= 64
    assert Steps().end(1.0) is None
