"""A view as Prometheus metrics. docs/OPERATING.md lists them; a test compares.

Names: `kvstore_` + the words of docs/ARCHITECTURE.md + a unit. Tokens are the currency of the hit rate:
`kvstore_tokens_total{outcome="pulled"} / kvstore_tokens_total{outcome="queried"}`.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvstore.admin.histogram import FrozenHistogram
from kvstore.admin.tier_metrics import devices, movement
from kvstore.admin.view import Motion, View
from kvstore.core import MissReason
from kvstore.store import Snapshot


class NodeCollector(Collector):
    """Renders the view that is current when Prometheus asks."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first view."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Every metric."""
        view = self._view()
        yield from _node(view)
        yield from _tiers(view.store)
        yield from _held(view.store)
        yield from _tokens(view.store)
        yield from _keys(view.store)
        yield _counters(
            "refused_reservations", "Objects not granted, by reason.", "reason", _by_reason(view.refused)
        )
        yield from _motion("push", "pushed by engines: from the grant to the commit", view.pushed)
        yield from _motion(
            "pull", "pulled by engines (or given up): from the lease to its release", view.pulled
        )
        yield from _motion("spill", "written to NVMe", view.spilled)
        yield from _motion("promotion", "read from NVMe", view.promoted)
        yield from movement(view.store)
        yield from devices(view.devices)
        yield from _control(view)
        yield from _index(view)


def registry_of(view: Callable[[], View]) -> CollectorRegistry:
    """A registry of this node's metrics and nothing else."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(view))
    return registry


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvstore_{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvstore_{name}", help_text, value=value)


def _counters(
    name: str, help_text: str, label: str, values: Mapping[str, int] | Mapping[str, float]
) -> Metric:
    family = CounterMetricFamily(f"kvstore_{name}", help_text, labels=[label])
    for word, value in values.items():
        family.add_metric([str(word)], value)
    return family


def _by_reason(counts: Mapping[MissReason, int]) -> dict[str, int]:
    """Every reason, so that a rate can be asked for before the first of its kind."""
    return {reason: counts.get(reason, 0) for reason in MissReason}


def _histogram(name: str, help_text: str, frozen: FrozenHistogram) -> Metric:
    buckets, count = [], 0
    for bound, more in zip((*map(str, frozen.bounds), "+Inf"), frozen.counts, strict=True):
        count += more
        buckets.append((bound, count))
    return HistogramMetricFamily(f"kvstore_{name}", help_text, buckets=buckets, sum_value=frozen.total)


def _node(view: View) -> Iterable[Metric]:
    who = GaugeMetricFamily(
        "kvstore_node_info", "Who this node is; always 1.", labels=["version", "node", "boot"]
    )
    who.add_metric([view.identity.version, view.identity.node, view.identity.boot], 1)
    yield who
    yield _gauge("uptime_seconds", "Since this boot.", view.uptime_s)
    yield _counter(
        "slept_seconds", "Time that the process was stopped for; nothing expired in it.", view.slept_s
    )
    yield _histogram("loop_lag_seconds", "How late the control loop turned.", view.loop_lag_s)


def _tiers(store: Snapshot) -> Iterable[Metric]:
    objects = GaugeMetricFamily("kvstore_objects", "Objects that may be promised.", labels=["tier"])
    stored = GaugeMetricFamily("kvstore_object_bytes", "Bytes of these objects.", labels=["tier"])
    size = GaugeMetricFamily("kvstore_tier_bytes", "Size of the tier.", labels=["tier"])
    free = GaugeMetricFamily("kvstore_tier_free_bytes", "Free pages.", labels=["tier"])
    held = GaugeMetricFamily(
        "kvstore_tier_held_bytes", "Held pages: a late write could still land.", labels=["tier"]
    )
    reserved = GaugeMetricFamily(
        "kvstore_tier_reserved_bytes", "Pages being filled by writers.", labels=["tier"]
    )
    leased = GaugeMetricFamily(
        "kvstore_tier_leased_bytes", "Pages that readers have a lease on.", labels=["tier"]
    )
    moving = GaugeMetricFamily(
        "kvstore_tier_moving_bytes", "Pages being filled from the other tier.", labels=["tier"]
    )
    for tier, use in store.tiers.items():
        objects.add_metric([tier], use.objects)
        stored.add_metric([tier], use.object_bytes)
        size.add_metric([tier], use.pages * use.page_bytes)
        free.add_metric([tier], use.free_pages * use.page_bytes)
        held.add_metric([tier], use.held_pages * use.page_bytes)
        reserved.add_metric([tier], use.reserved_pages * use.page_bytes)
        leased.add_metric([tier], use.leased_pages * use.page_bytes)
        moving.add_metric([tier], use.moving_pages * use.page_bytes)
    return objects, stored, size, free, held, reserved, leased, moving


def _held(store: Snapshot) -> Iterable[Metric]:
    yield _gauge("leases", "Leases of readers.", store.leases)
    yield _gauge("reservations", "Reservations of writers.", store.reservations)
    yield _gauge("clients", "Clients that hold something or spoke lately.", store.clients)
    yield _gauge("namespaces", "Open namespaces.", store.namespaces)
    yield _gauge("watched_keys", "Keys that parked requests wait for.", store.watched_keys)


def _tokens(store: Snapshot) -> Iterable[Metric]:
    totals = store.totals
    outcomes = {
        "queried": totals.queried_tokens,
        "promised": totals.promised_tokens,
        "pulled": totals.hit_tokens,
    }
    yield _counters("tokens", "Tokens of engine requests, as engines report them.", "outcome", outcomes)
    yield _counters(
        "missed_tokens",
        "Tokens that were queried and not pulled, by reason.",
        "reason",
        _by_reason(totals.missed_tokens),
    )
    yield _counter("reports", "Engine requests reported.", totals.reports)


def _keys(store: Snapshot) -> Iterable[Metric]:
    totals = store.totals
    answers = {name: getattr(totals, name) for name in ("granted", "exists", "busy", "refused")}
    yield _counters("reserve_answers", "Answers to Reserve, per key.", "answer", answers)
    yield _counters(
        "commit_answers",
        "Answers to Commit, per key.",
        "answer",
        {"committed": totals.committed, "stale": totals.stale},
    )
    yield _counter("aborted_reservations", "Reservations given back.", totals.aborted)
    yield _counter("acquired_keys", "Keys promised to readers.", totals.acquired_keys)
    yield _counters(
        "missed_keys", "Keys asked for in vain, by reason.", "reason", _by_reason(totals.missed_keys)
    )
    expired = {"reservation": totals.expired_reservations, "lease": totals.expired_leases}
    yield _counters("expired", "What ended because its time was up.", "what", expired)
    yield _counter("evicted_objects", "Objects given up for room.", totals.evicted)
    yield _counter("evicted_bytes", "Bytes of these objects.", totals.evicted_bytes)
    yield _counter("dropped_objects", "Objects dropped by an administrator.", totals.dropped)
    yield _counter("verified_copies", "Suspected copies that were verified.", totals.verified)
    yield _counter("checksum_failures", "Copies whose bytes did not match their table.", totals.bad_copies)


def _motion(name: str, what: str, motion: Motion) -> Iterable[Metric]:
    yield _counter(f"{name}_objects", f"Objects {what}.", motion.objects)
    yield _counter(f"{name}_bytes", f"Bytes of objects {what}.", motion.object_bytes)
    yield _histogram(f"{name}_seconds", f"Time for objects {what}.", motion.seconds)


def _control(view: View) -> Iterable[Metric]:
    server = view.server
    yield _counters("requests", "Control requests.", "call", server.requests)
    yield _counters("request_seconds", "Time of the control loop that they took.", "call", server.busy_s)
    yield _counters("failed_requests", "Control requests refused as a whole.", "code", server.failures)
    yield _counter("garbage_frames", "Frames that were not of this protocol.", server.garbage_frames)
    yield _counter("lost_replies", "Replies that nobody took.", server.lost_replies)
    yield _gauge(
        "parked_requests", "Requests that wait for a commit, or for a copy from NVMe.", server.parked
    )


def _index(view: View) -> Iterable[Metric]:
    publisher = view.publisher
    yield _gauge("index_up", "Whether the last call to Redis succeeded.", publisher.up)
    yield _gauge("publish_pending_keys", "Keys whose state Redis has not confirmed.", publisher.pending_keys)
    yield _counter("published_keys", "Keys sent to Redis.", publisher.sent_keys)
    yield _counter("publish_passes", "Passes over all keys.", publisher.passes)
    yield _counter("index_failures", "Calls that Redis did not answer.", publisher.failures)
    yield _counter("index_losses", "Times that Redis had lost its data.", publisher.losses)
    yield _counter(
        "redis_restarts", "Times that the embedded Redis ended and was started again.", view.redis_restarts
    )
