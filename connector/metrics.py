"""The connector in vLLM's own `/metrics` and in its periodic log line.

The scheduler half counts between steps (`EngineStats`), vLLM carries the counts to the frontend, which may be
another process, and there they go into Prometheus (`PromMetrics`). Workers count only how long steps wait for them:
what else they measure comes with their reports. A frontend does not die of a payload that it does not understand.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from connector.compat import Counter, Gauge, Histogram, KVConnectorPromMetrics, KVConnectorStats
from connector.guard import Breaker, harmless

OBSERVATIONS_MAX = 4_096  # per stage between two questions; more are not counted
STEP_MIN_S = 0.0001
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


class Metric(NamedTuple):
    """One metric: its meaning, and what its samples differ in (empty: there is one)."""

    meaning: str
    label: str = ""


PREFIX = "vllm:kvstore_"
COUNTERS = {
    "queried_tokens": Metric(
        "Prompt tokens beyond the local prefix cache, of requests that were computed or loaded."
    ),
    "promised_tokens": Metric("Those that the store had promised when blocks were allocated."),
    "pulled_tokens": Metric(
        "Those that were loaded; host: from a node's memory, disk: from its NVMe.", "tier"
    ),
    "missed_tokens": Metric("Those that were not; pulled and missed are queried.", "reason"),
    "saved_tokens": Metric("Tokens of objects that have become visible."),
    "dropped_tokens": Metric("Tokens of objects that were to be saved and were not.", "reason"),
    "bytes": Metric("Bytes that workers have moved.", "direction"),
    "load_decisions": Metric(
        "Promises by what was decided on them: load, cut (in part), compute, probe (to measure).", "decision"
    ),
}
GAUGES = {
    "prefill_tokens_per_second": Metric("How fast this engine computes prompts, as far as measured."),
    "pull_bytes_per_second": Metric("How fast loads come, by node and tier, as far as measured.", "source"),
}
HISTOGRAMS = {
    "seconds": Metric(
        "lookup, lease, reserve, commit: a question to the store. read: until a load's last byte has come; "
        "load, save: from job to report, on the slowest worker. step: what a step of the engine spends in the "
        "connector, in the scheduler and in each worker, from 0.1 ms on.",
        "stage",
    ),
}


@dataclass
class EngineStats(KVConnectorStats):
    """Counts between two questions: `{"counts": {name: {label: number}}, "gauges": ..., "seconds": {stage: [s]}}`."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, amount: int, label: str = "") -> None:
        """So much more of it."""
        assert name in COUNTERS, f"no counter {name}"
        if amount:
            counts = self.data.setdefault("counts", {}).setdefault(name, {})
            counts[label] = counts.get(label, 0) + amount

    def show(self, name: str, value: float, label: str = "") -> None:
        """A value that holds until the next one."""
        assert name in GAUGES, f"no gauge {name}"
        self.data.setdefault("gauges", {}).setdefault(name, {})[label] = value

    def observe(self, stage: str, seconds: float) -> None:
        """One duration."""
        observed = self.data.setdefault("seconds", {}).setdefault(stage, [])
        if len(observed) < OBSERVATIONS_MAX:
            observed.append(seconds)

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "EngineStats":
        """Both together."""
        for name, counts in other.data.get("counts", {}).items():
            for label, amount in counts.items():
                self.add(name, amount, label)
        for name, values in other.data.get("gauges", {}).items():
            for label, value in values.items():
                self.show(name, value, label)
        for stage, observed in other.data.get("seconds", {}).items():
            for seconds in observed:
                self.observe(stage, seconds)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line that vLLM writes every few seconds."""
        counts: Mapping[str, Mapping[str, int]] = self.data.get("counts", {})
        queried = sum(counts.get("queried_tokens", {}).values())
        pulled = sum(counts.get("pulled_tokens", {}).values())
        line: dict[str, int | float] = {"Queried tokens": queried, "Pulled tokens": pulled}
        if queried:
            line["Hit rate (%)"] = round(100 * pulled / queried, 1)
        line["Saved tokens"] = sum(counts.get("saved_tokens", {}).values())
        line["Dropped tokens"] = sum(counts.get("dropped_tokens", {}).values())
        for stage, observed in sorted(self.data.get("seconds", {}).items()):
            line[f"Median {stage} (ms)"] = round(1_000 * median(observed), 2)
        return line

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def with_step(counted: EngineStats | None, spent_s: float) -> EngineStats | None:
    """Adds what a step has spent in the connector, if that is worth a word."""
    if spent_s < STEP_MIN_S:
        return counted
    stats = EngineStats() if counted is None else counted
    stats.observe("step", spent_s)
    return stats


class PromMetrics(KVConnectorPromMetrics):
    """The same in Prometheus, with vLLM's own labels."""

    off = False

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.breaker = Breaker(time.monotonic)
        self._counters = self._made(metric_types[Counter], COUNTERS)
        self._gauges = self._made(metric_types[Gauge], GAUGES, multiprocess_mode="mostrecent")
        self._histograms = self._made(metric_types[Histogram], HISTOGRAMS, buckets=SECONDS)

    def _made(self, kind: Any, metrics: Mapping[str, Metric], **more: Any) -> dict[str, Any]:
        return {
            name: kind(
                name=f"{PREFIX}{name}",
                documentation=metric.meaning,
                labelnames=[*self._labelnames, *([metric.label] if metric.label else [])],
                **more,
            )
            for name, metric in metrics.items()
        }

    @harmless(lambda: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what one engine has counted."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, counts in transfer_stats_data.get("counts", {}).items():
            for label, amount in counts.items():
                self._sample(self._counters[name], engine, COUNTERS[name], label).inc(amount)
        for name, values in transfer_stats_data.get("gauges", {}).items():
            for label, value in values.items():
                self._sample(self._gauges[name], engine, GAUGES[name], label).set(value)
        for stage, observed in transfer_stats_data.get("seconds", {}).items():
            sample = self._sample(self._histograms["seconds"], engine, HISTOGRAMS["seconds"], stage)
            for seconds in observed:
                sample.observe(seconds)

    def _sample(self, metric: Any, engine: list[object], described: Metric, label: str) -> Any:
        return metric.labels(*engine, *([label] if described.label else []))


_made: list[PromMetrics] = []  # the last one of this process


def prom_metrics(
    vllm_config: Any,
    metric_types: dict[Any, Any],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> PromMetrics:
    """The connector's metrics, registered. Two of the connector in one MultiConnector share them: Prometheus knows
    every name once, and vLLM keeps their counts by class already."""
    try:
        _made[:] = [PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)]
    except ValueError:
        if not _made:
            raise
    return _made[0]
