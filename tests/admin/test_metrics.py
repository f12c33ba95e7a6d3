"""Metrics: what Prometheus reads is what the view says, and docs/OPERATING.md lists it all."""

import re
from pathlib import Path

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.admin import AdminServer, Histogram, ObjectsPage
from kvstore.admin.metrics import registry_of
from kvstore.core import MissReason
from kvstore.store import ReportLog
from tests.admin.views import a_view, motion


def families(**changes: object):
    view = a_view(**changes)
    text = generate_latest(registry_of(lambda: view)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_values_carry_their_labels() -> None:
    found = families()
    refused = {
        sample.labels["reason"]: sample.value for sample in found["kvstore_refused_reservations"].samples
    }
    assert refused == {reason.value: 3.0 if reason is MissReason.NO_ROOM else 0.0 for reason in MissReason}
    (size,) = found["kvstore_tier_bytes"].samples
    assert (size.labels, size.value) == ({"tier": "dram"}, float(64 << 20))
    (info,) = found["kvstore_node_info"].samples
    assert info.labels == {"version": "1", "node": "n", "boot": "b"}
    assert found["kvstore_index_up"].samples[0].value == 1.0


def test_every_reason_of_a_miss_is_there_before_the_first_miss() -> None:
    for name in ("kvstore_missed_tokens", "kvstore_missed_keys"):
        assert {sample.labels["reason"] for sample in families()[name].samples} == set(MissReason)


def test_a_histogram_is_cumulative_and_complete() -> None:
    """Mutants: buckets not cumulative; the bound itself counted into the next bucket."""
    samples = families(pushed=motion(0.005, 0.02, 0.3, 1000.0))["kvstore_push_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert buckets["0.005"] == 1
    assert buckets["0.01"] == 1
    assert buckets["0.025"] == 2
    assert buckets["0.5"] == 3
    assert buckets["120.0"] == 3
    assert buckets["+Inf"] == 4
    assert [s.value for s in samples if s.name.endswith("_count")] == [4]


def test_a_frozen_histogram_does_not_change() -> None:
    histogram = Histogram((1.0,))
    before = histogram.freeze()
    histogram.observe(0.5)
    assert before.counts == (0, 0)
    assert histogram.freeze().counts == (1, 0)


def test_every_metric_is_described_in_the_manual(repository: Path) -> None:
    page = (repository / "docs/OPERATING.md").read_text()
    described = re.findall(r"^\| `(kvstore_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", page, re.MULTILINE)
    assert described == [
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            ", ".join(sorted({label for s in family.samples for label in s.labels} - {"le"})),
            family.documentation,
        )
        for family in families().values()
    ]


def test_every_endpoint_is_described_in_the_manual(repository: Path) -> None:
    async def nothing(limit: int, cursor: int) -> ObjectsPage:
        return ObjectsPage(objects=(), cursor=None)

    async def no_reports() -> ReportLog:
        return ReportLog(0.0, [])

    page = (repository / "docs/OPERATING.md").read_text()
    described = re.findall(r"^\| `(/[\w/{}]+)` \| (.+) \|$", page, re.MULTILINE)
    server = AdminServer(("127.0.0.1", 0), b"", a_view(), nothing, no_reports)
    assert described == [(route.path, route.meaning) for route in server.routes]
