"""The proxy's own metrics, all named `kvstore_proxy_*`; docs/PROXY.md lists them, a test compares."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.proxy.ask import Endpoint
from kvstore.proxy.engine import Engine, Role

PREFIX = "kvstore_proxy"
OUTCOMES = ("ok", "refused", "engine_error", "failed", "broken_off", "cancelled")
FAILURE_REASONS = ("connect", "died", "timeout", "status", "garbled")
FALLBACK_REASONS = ("no_prefill", "prefill_failed", "prefill_refused", "no_hand_off")
HAND_OVER_OUTCOMES = ("continued", "not_possible", "no_engine", "differs")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ProxyMetrics:
    """Every one of them, with every label value from the start, so that a rate can be asked for."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            f"{PREFIX}_requests",
            "Requests of clients, by outcome.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.in_flight = Gauge(f"{PREFIX}_in_flight", "Requests of clients under way.", registry=registry)
        self.prefill_seconds = Histogram(
            f"{PREFIX}_prefill_seconds",
            "From the request to the hand-off; its count is the number of hand-offs.",
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            f"{PREFIX}_first_token_seconds",
            "From a streamed request to its first token, prefill included.",
            buckets=SECONDS,
            registry=registry,
        )
        self.fallbacks = Counter(
            f"{PREFIX}_fallbacks",
            "Requests that went to decode without a hand-off, though there are prefill engines.",
            ["reason"],
            registry=registry,
        )
        self.failures = Counter(
            f"{PREFIX}_engine_failures",
            "Requests that an engine failed; another is asked if there is one.",
            ["role", "reason"],
            registry=registry,
        )
        self.hand_overs = Counter(
            f"{PREFIX}_hand_overs",
            "Streams whose engine died in the middle, by what came of them.",
            ["outcome"],
            registry=registry,
        )
        for endpoint in Endpoint:
            for outcome in OUTCOMES:
                self.requests.labels(endpoint, outcome)
        for reason in FALLBACK_REASONS:
            self.fallbacks.labels(reason)
        for role in Role:
            for reason in FAILURE_REASONS:
                self.failures.labels(role, reason)
        for outcome in HAND_OVER_OUTCOMES:
            self.hand_overs.labels(outcome)
        self.registry.register(_EngineCollector(engines))


class _EngineCollector(Collector):
    """The engines as they are when Prometheus asks."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        labels = ["role", "engine"]
        up = GaugeMetricFamily(f"{PREFIX}_engine_up", "1: gets new requests.", labels=labels)
        busy = GaugeMetricFamily(
            f"{PREFIX}_engine_in_flight", "Requests that this engine works on.", labels=labels
        )
        for engine in self._engines():
            up.add_metric([engine.role, engine.url], engine.up)
            busy.add_metric([engine.role, engine.url], engine.in_flight)
        return up, busy
