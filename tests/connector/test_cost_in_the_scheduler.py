"""Load or compute in vLLM's real scheduler, over a link of any speed, in virtual time; and whence tokens came."""

from collections.abc import Sequence
from typing import Any

import pytest

from connector.compat import CacheHitSource
from connector.cost import PROBE_OBJECTS, Decision
from connector.metadata import LoadJob, LoadReport
from kvstore.core import MissReason, Tier
from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt

PREFILL = 10_000.0  # tokens a second
CHUNKS = 5
TOKENS = CHUNKS * CHUNK + 5  # a request's prompt
BEFORE, REQUESTS = 20, 130


class TimedEngine(Engine):
    """An engine whose steps and loads take their time. `rate` is that of the link, in stored tokens a second."""

    rate = PREFILL
    disk_rate: float | None = None

    def _settle(self) -> None:
        output, _ = self._in_flight[0]
        self.now += 0.001 + sum(output.num_scheduled_tokens.values()) / PREFILL
        super()._settle()


def timed(engine: TimedEngine) -> TimedEngine:
    """Its worker says how long loads took."""
    load = engine.worker._load

    def slow(job: LoadJob, output: Any) -> LoadReport:
        report, now, ends_s = load(job, output), 0.0, []
        for wanted in job.objects[: report.valid]:
            on_disk = wanted.key in engine.node.on_disk and engine.disk_rate
            now += len(wanted.blocks) * BLOCK / (on_disk or engine.rate)
            ends_s.append(now)
        return LoadReport(report.valid, report.reason, report.suspect, total_s=now, ends_s=tuple(ends_s))

    engine.worker._load = slow  # type: ignore[method-assign]
    return engine


@pytest.fixture
def node() -> Node:
    return Node()


def stored(node: Node, numbers: Sequence[int]) -> None:
    """Another engine has computed these prompts."""
    writer = Engine(node, max_batched=1024, num_blocks=400)
    for number in numbers:
        writer.generate(f"w{number}", prompt(number, TOKENS), max_tokens=1)
    assert len(node.objects) >= len(numbers) * CHUNKS


def reader(node: Node, rate: float, **more: Any) -> TimedEngine:
    engine = timed(TimedEngine(node, max_batched=1024, save=False, **more))
    engine.rate = rate
    for warm in range(3):  # so that it knows what computing costs
        engine.generate(f"warm{warm}", prompt(900 + warm, 700), max_tokens=1)
    return engine


def pulled_tokens(engine: Engine, name: str, number: int) -> int:
    before = engine.half.shared.stats.pulled_tokens
    engine.generate(name, prompt(number, TOKENS), max_tokens=1)
    return engine.half.shared.stats.pulled_tokens - before


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize(("speed", "expected"), [(0.1, 0), (10.0, CHUNKS * CHUNK)])
def test_after_twenty_requests_the_sooner_way_is_taken(node, speed, expected, ahead) -> None:
    """At one tenth of break-even at least 95 % compute, at ten times 95 % load; less than 2 % are probes."""
    stored(node, range(REQUESTS))
    engine = reader(node, PREFILL * speed, ahead=ahead)
    pulled = [pulled_tokens(engine, f"r{n}", n) for n in range(REQUESTS)]
    after = pulled[BEFORE:]
    assert after.count(expected) >= 0.95 * len(after)
    decisions = engine.half.shared.cost.decisions
    assert decisions[Decision.PROBE] < 0.02 * REQUESTS
    if not expected:
        assert decisions[Decision.PROBE] == 1 and PROBE_OBJECTS * CHUNK in after
        assert engine.half.shared.stats.misses[MissReason.TOO_SLOW] >= 100
    assert engine.half.shared.cost.numbers.prefill_tokens_per_s == pytest.approx(PREFILL, rel=0.1)
    engine.assert_nothing_left()


def test_a_refused_promise_leaves_no_lease_and_its_objects_are_not_offered_again(node) -> None:
    stored(node, range(6))
    engine = reader(node, PREFILL / 10)
    for n in range(6):
        pulled_tokens(engine, f"r{n}", n)
    assert not node.leases
    engine.assert_nothing_left()


@pytest.mark.parametrize(("policy", "pulls"), [("always", True), ("never", False)])
def test_a_switch_forces_either(node, policy, pulls) -> None:
    stored(node, range(8))
    for speed in (0.1, 10.0):
        engine = reader(node, PREFILL * speed, load_policy=policy)
        assert all(bool(pulled_tokens(engine, f"r{n}", n)) is pulls for n in range(8))


def test_what_is_in_dram_is_loaded_and_what_is_on_a_slow_disk_is_computed(node) -> None:
    stored(node, range(12))
    engine = reader(node, PREFILL * 10)
    engine.disk_rate = PREFILL / 10
    node.on_disk = {key for n, key in enumerate(node.objects) if n % (CHUNKS) >= 2}
    pulled = [pulled_tokens(engine, f"r{n}", n) for n in range(12)]
    assert pulled[0] == CHUNKS * CHUNK  # not measured yet
    assert pulled[6:] == [2 * CHUNK] * 6
    rates = engine.half.shared.cost.numbers.pull_bytes_per_s
    assert {tier for _, tier in rates} == {"dram", "nvme"}
    engine.assert_nothing_left()


def test_what_is_not_loaded_is_given_back_at_once(node) -> None:
    """Mutant: it stays leased until the load is over; or, where nothing is loaded, until the lease runs out."""
    stored(node, range(8))
    engine = reader(node, PREFILL * 10)
    engine.disk_rate = PREFILL / 10
    node.on_disk = {key for n, key in enumerate(node.objects) if n % CHUNKS >= 2}
    for n in range(7):
        pulled_tokens(engine, f"r{n}", n)
    engine.worker.hold_loads = True
    engine.submit("r7", prompt(7, TOKENS))
    engine.step()
    [leased] = node.leases.values()
    assert leased == list(node.objects)[7 * CHUNKS :][:2]
    engine.worker.hold_loads = False
    engine.run()
    engine.assert_nothing_left()


# --- whence tokens came -------------------------------------------------------------------------------


def test_hits_are_told_by_the_tier_they_came_from(node) -> None:
    """To vLLM, in the counters, and in the log. Mutants: a hit on NVMe counts as host once it has been promoted."""
    stored(node, [1])
    node.on_disk = set(list(node.objects)[2:])
    engine = Engine(node, max_batched=1024, save=False)
    seen: list[dict[CacheHitSource, int]] = []
    ask = engine.connector.get_external_cache_hit_sources

    def told(request: Any, tokens: int) -> dict[CacheHitSource, int]:
        seen.append(ask(request, tokens))
        return seen[-1]

    engine.connector.get_external_cache_hit_sources = told
    engine.generate("b", prompt(1, TOKENS), max_tokens=1)
    assert seen == [{CacheHitSource.HOST: 2 * CHUNK, CacheHitSource.DISK: 3 * CHUNK}]
    stats = engine.half.shared.stats
    assert (stats.pulled_tokens, stats.disk_tokens) == (CHUNKS * CHUNK, 3 * CHUNK)
    engine.step()
    [line] = [line for line in engine.control.lines if line.request == "b"]
    assert (line.pulled_tokens, line.disk_tokens) == (CHUNKS * CHUNK, 3 * CHUNK)
    engine.assert_nothing_left()


def test_the_log_says_what_came_from_nvme(node, caplog_vllm) -> None:
    stored(node, [1])
    node.on_disk = set(list(node.objects)[3:])
    engine = Engine(node, max_batched=1024, save=False)
    with caplog_vllm.at_level("INFO"):
        engine.generate("b", prompt(1, TOKENS), max_tokens=1)
    assert f"request b: {CHUNKS * CHUNK} tokens pulled: {2 * CHUNK} from NVMe" in caplog_vllm.text


def test_a_request_without_a_load_has_no_sources(node) -> None:
    engine = Engine(node)
    request = engine.submit("b", prompt(1, TOKENS))
    assert engine.connector.get_external_cache_hit_sources(request, 0) == {}
    engine.run()


def test_rates_are_gauges_and_decisions_are_counted(node) -> None:
    stored(node, range(4))
    engine = reader(node, PREFILL * 10)
    for n in range(4):
        pulled_tokens(engine, f"r{n}", n)
    engine.half.shared.stats.fresh.add("bytes", 1, "pulled")
    stats = engine.connector.get_kv_connector_stats()
    assert stats is not None
    gauges = stats.data["gauges"]
    assert gauges["prefill_tokens_per_second"][""] == pytest.approx(PREFILL, rel=0.1)
    assert list(gauges["pull_bytes_per_second"]) == [f"{node.address.node.hex()} {Tier.DRAM}"]
