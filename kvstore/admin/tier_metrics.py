"""Metrics of what moves between tiers, and of each device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.core import MissReason
from kvstore.store import Snapshot
from kvstore.tiers import NvmeStats, Refusal

_PROMOTION_FAILURES = (
    MissReason.DEVICE_DOWN,
    MissReason.PROMOTE_DEADLINE,
    MissReason.NO_ROOM,
    MissReason.BAD_COPY,
)


def movement(store: Snapshot) -> Iterable[Metric]:
    """Copies that came to NVMe, came back, or left a tier."""
    totals = store.totals
    left = {"demoted": totals.demoted, "trimmed": totals.trimmed, "orphaning": totals.orphaning}
    family = CounterMetricFamily(
        "kvstore_tier_changes",
        "Copies that left DRAM for NVMe (demoted), left NVMe and stay in DRAM (trimmed); objects given up although "
        "NVMe has children of them (orphaning).",
        labels=["change"],
    )
    for change, count in left.items():
        family.add_metric([change], count)
    yield family
    yield CounterMetricFamily("kvstore_found_objects", "Objects found on devices.", value=totals.found)
    spills = {**dict.fromkeys((*Refusal, MissReason.BAD_COPY), 0), **totals.failed_spills}
    yield _by("failed_spills", "Copies that were not stored on NVMe, by reason.", "reason", spills)
    promotions = {**dict.fromkeys(_PROMOTION_FAILURES, 0), **totals.failed_promotions}
    yield _by("failed_promotions", "Copies that did not come to DRAM, by reason.", "reason", promotions)
    yield GaugeMetricFamily("kvstore_moving_copies", "Copies on their way between tiers.", value=store.moving)
    yield GaugeMetricFamily(
        "kvstore_waiting_promotions", "Promotions that wait for room.", value=store.waiting
    )


def devices(stats: Sequence[NvmeStats]) -> Iterable[Metric]:
    """Of each device, by its path."""
    yield _gauges(stats, "up", "Whether the device can be used.", lambda each: each.up)
    yield _counters(stats, "trips", "Times that it failed.", lambda each: each.trips)
    yield _gauges(stats, "objects", "Objects on it.", lambda each: each.objects)
    yield _gauges(stats, "object_bytes", "Bytes of these objects.", lambda each: each.object_bytes)
    yield _gauges(stats, "bytes", "Size of its data pages.", lambda each: each.pages * each.page_bytes)
    yield _gauges(
        stats, "free_bytes", "Pages it can give out now.", lambda each: each.free_pages * each.page_bytes
    )
    yield _gauges(
        stats,
        "failed_bytes",
        "Pages that could not be written.",
        lambda each: each.failed_pages * each.page_bytes,
    )
    yield _counters(stats, "written_bytes", "Bytes of objects written.", lambda each: each.counts.put_bytes)
    yield _counters(stats, "read_bytes", "Bytes of objects read.", lambda each: each.counts.get_bytes)
    yield _counters(stats, "failed_writes", "Objects not written.", lambda each: each.counts.failed_puts)
    yield _counters(stats, "failed_reads", "Objects not read.", lambda each: each.counts.failed_gets)
    yield _counters(
        stats, "bad_copies", "Objects whose bytes did not match.", lambda each: each.counts.bad_copies
    )
    yield _gauges(
        stats,
        "wear_left_bytes",
        "What the wear budget allows now; -1: no bound.",
        lambda each: each.wear_left_bytes,
    )


def _by(name: str, help_text: str, label: str, counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"kvstore_{name}", help_text, labels=[label])
    for word, count in counts.items():
        family.add_metric([str(word)], count)
    return family


def _gauges(
    stats: Sequence[NvmeStats], name: str, help_text: str, value: Callable[[NvmeStats], float]
) -> Metric:
    family = GaugeMetricFamily(f"kvstore_device_{name}", help_text, labels=["device"])
    for each in stats:
        family.add_metric([each.path], value(each))
    return family


def _counters(
    stats: Sequence[NvmeStats], name: str, help_text: str, value: Callable[[NvmeStats], float]
) -> Metric:
    family = CounterMetricFamily(f"kvstore_device_{name}", help_text, labels=["device"])
    for each in stats:
        family.add_metric([each.path], value(each))
    return family
