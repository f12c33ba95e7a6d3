"""The connector in vLLM's own metrics: what is counted arrives, through vLLM's own carriers, and harms nobody."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from connector import KVStoreConnector
from connector.guard import Breaker
from connector.metadata import SaveJob, SaveObject
from connector.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    OBSERVATIONS_MAX,
    PREFIX,
    STEP_MIN_S,
    EngineStats,
    with_step,
)
from connector.stats import Cause
from kvstore.core import Key, MissReason
from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt
from tests.connector.test_multi import MultiEngine

TEXT = prompt(1, 2 * CHUNK + BLOCK + 5)
LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def frontend(engine: Engine) -> KVConnectorProm:
    return KVConnectorProm(engine.config, ["model_name", "engine"], {0: ["m", "0"]})


def arrived(engine: Engine) -> list[dict[str, Any]]:
    """What vLLM's scheduler has sent to the frontend since the last call, as it comes out there."""
    sent, engine.sent_stats = engine.sent_stats, []
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(stats)) for stats in sent]


def observe(prom: KVConnectorProm, engine: Engine) -> None:
    for stats in arrived(engine):
        prom.observe(stats)


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"{PREFIX}{name}", LABELS | labels) or 0.0


def test_what_happened_arrives_in_prometheus() -> None:
    node = Node()
    Engine(node).generate("a", TEXT[: CHUNK + 1])
    engine = Engine(node)
    prom = frontend(engine)
    engine.generate("b", TEXT)
    observe(prom, engine)
    queried = len(TEXT)
    assert sample("queried_tokens_total") == queried
    assert sample("promised_tokens_total") == sample("pulled_tokens_total", tier="host") == CHUNK
    missed = sample("missed_tokens_total", reason=str(MissReason.NEVER_STORED))
    assert missed == queried - CHUNK
    assert sample("saved_tokens_total") == CHUNK + BLOCK
    assert sample("seconds_count", stage="load") == 1
    assert sample("seconds_count", stage="save") >= 1


def test_each_thing_is_counted_once() -> None:
    """Mutant: what was told is told again."""
    engine = Engine(Node())
    prom = frontend(engine)
    for name in "abc":
        engine.generate(name, prompt(ord(name), CHUNK))
        observe(prom, engine)
    assert sample("saved_tokens_total") == 3 * CHUNK
    assert sample("queried_tokens_total") == engine.half.shared.stats.queried_tokens == 3 * CHUNK


@pytest.mark.parametrize("reason", [MissReason.NO_ROOM, None])
def test_what_was_not_saved_has_its_reason(reason) -> None:
    node = Node(refuse=reason)
    engine = Engine(node)
    engine.worker.fail_saves = reason is None
    prom = frontend(engine)
    engine.generate("a", TEXT)
    observe(prom, engine)
    label = str(reason or Cause.NOT_WRITTEN.name.lower())
    assert sample("dropped_tokens_total", reason=label) == 2 * CHUNK + BLOCK
    assert sample("saved_tokens_total") == 0


def test_ranks_are_added_up_and_the_slowest_counts() -> None:
    node = Node()
    engine = Engine(node, ranks=2)
    engine.generate("a", TEXT)
    saves = [s for stats in arrived(engine) for s in stats.get("seconds", {}).get("save", [])]
    assert len(saves) == len(engine.worker.seen_saves)


def stats_of(**counts: int) -> EngineStats:
    stats = EngineStats()
    for name, amount in counts.items():
        stats.add(name, amount, "x" if COUNTERS[name].label else "")
    return stats


def test_stats_add_up() -> None:
    one, other = stats_of(queried_tokens=100, saved_tokens=5), stats_of(queried_tokens=20, pulled_tokens=60)
    one.observe("load", 0.25)
    other.observe("load", 0.75)
    both = one.aggregate(other)
    assert both.data["counts"] == {
        "queried_tokens": {"": 120},
        "saved_tokens": {"": 5},
        "pulled_tokens": {"x": 60},
    }
    assert both.reduce() == {
        "Queried tokens": 120,
        "Pulled tokens": 60,
        "Hit rate (%)": 50.0,
        "Saved tokens": 5,
        "Dropped tokens": 0,
        "Median load (ms)": 500.0,
    }
    both.reset()
    assert both.is_empty() and EngineStats().is_empty()
    assert stats_of(queried_tokens=0).is_empty()


def test_what_nobody_asks_for_stays_small() -> None:
    stats = EngineStats()
    for _ in range(OBSERVATIONS_MAX + 10):
        stats.observe("load", 1.0)
    assert len(stats.aggregate(stats).data["seconds"]["load"]) == OBSERVATIONS_MAX


GARBAGE: list[Any] = [
    {"counts": {"unheard_of": {"": 1}}},
    {"counts": {"queried_tokens": {"": "many"}}},
    {"counts": 3},
    {"seconds": {"load": None}},
    [],
]


@pytest.mark.parametrize("payload", GARBAGE)
def test_a_frontend_outlives_what_it_does_not_understand(payload) -> None:
    prom = frontend(Engine(Node()))
    prom.observe(payload)
    prom.observe({"counts": {"queried_tokens": {"": 7}}}, engine_idx=5)
    prom.observe({"counts": {"queried_tokens": {"": 7}}})
    assert sample("queried_tokens_total") == 7


def test_the_line_in_the_log_is_vllms(caplog_vllm) -> None:
    engine = Engine(Node())
    line = KVConnectorLogging(engine.config.kv_transfer_config)
    for name in "ab":
        engine.generate(name, prompt(ord(name), CHUNK))
        for stats in arrived(engine):
            line.observe(stats)
    said: list[str] = []
    line.log(lambda text, values: said.append(text % values))
    assert f"Queried tokens={2 * CHUNK}" in said[0] and f"Saved tokens={2 * CHUNK}" in said[0]


def test_within_a_multi_connector(caplog_vllm) -> None:
    """Two of our class in one: vLLM registers the metrics of each child, and Prometheus knows every name once."""
    node = Node()
    Engine(node).generate("a", TEXT)
    engine = MultiEngine([Node(2), node])
    prom = frontend(engine)
    engine.generate("b", TEXT)
    line = KVConnectorLogging(engine.config.kv_transfer_config)
    for data in arrived(engine):
        assert set(data) == {"KVStoreConnector"}
        prom.observe(data)
        line.observe(data)
    assert sample("pulled_tokens_total", tier="host") == 2 * CHUNK + BLOCK
    said: list[str] = []
    line.log(lambda text, values: said.append(text % values))
    assert "Pulled tokens" in said[0]


def test_workers_tell_what_their_steps_spend_and_nothing_else(monkeypatch) -> None:
    """Hooks that call each other count once. Mutants: only the last hook counts; the inner one counts again."""
    now = iter([1.0, 1.25, 2.0, 2.5, *range(3, 20)])
    monkeypatch.setattr("connector.guard.time.perf_counter", lambda: next(now))
    worker = KVStoreConnector.__new__(KVStoreConnector)
    worker._role, worker.breaker = None, Breaker(lambda: 0.0)
    assert worker.get_kv_connector_stats() is None
    worker.breaker.take_spent_s()
    worker._worker = SimpleNamespace(
        get_block_ids_with_load_errors=lambda: {1},
        build_connector_worker_meta=worker.get_block_ids_with_load_errors,
    )
    assert worker.build_connector_worker_meta() == {1}
    worker.save_kv_layer("layer", None, None)
    told = worker.get_kv_connector_stats()
    assert told is not None
    assert told.data == {"seconds": {"step": [0.5 + 1.0]}}


def test_a_step_that_spends_next_to_nothing_is_not_told() -> None:
    assert with_step(None, STEP_MIN_S / 2) is None
    counted = EngineStats()
    assert with_step(counted, STEP_MIN_S / 2) is counted
    assert counted.is_empty()


def test_the_documentation_lists_them_all(repository) -> None:
    page = (repository / "docs/CONNECTOR.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith(f"| `{PREFIX}")]
    expected = [
        f"| `{PREFIX}{name}{suffix}` | {metric.label or '-'} | {metric.meaning} |"
        for metrics, suffix in ((COUNTERS, "_total"), (GAUGES, ""), (HISTOGRAMS, ""))
        for name, metric in metrics.items()
    ]
    assert rows == expected


def test_what_comes_from_nvme_is_a_hit_on_disk() -> None:
    """In our counts and in vLLM's own, which ask while the load is under way."""
    node = Node()
    Engine(node).generate("a", TEXT)
    node.on_disk = set(list(node.objects)[1:])
    engine = Engine(node)
    prom = frontend(engine)
    sources: dict[Any, int] = {}
    ask = engine.connector.get_external_cache_hit_sources

    def asked(request: Any, num_tokens: int) -> dict[Any, int]:
        sources.update(ask(request, num_tokens))
        return ask(request, num_tokens)

    with patch.object(engine.connector, "get_external_cache_hit_sources", asked):
        engine.generate("b", TEXT)
    observe(prom, engine)
    assert sources == {CacheHitSource.HOST: CHUNK, CacheHitSource.DISK: CHUNK + BLOCK}
    assert sample("pulled_tokens_total", tier="host") == CHUNK
    assert sample("pulled_tokens_total", tier="disk") == CHUNK + BLOCK


def test_lines_of_saves_name_their_requests() -> None:
    def job(*requests: str) -> SaveJob:
        node = Node().address
        return SaveJob(1, node, tuple(SaveObject(Key(bytes(32)), b"", (), 1, (), r) for r in requests), 1.0)

    assert job("a", "a").whose == "request a"
    assert job("a", "b", "a").whose == "requests a, b"
    assert job(*"abcde").whose == "requests a, b, c and 2 more"
