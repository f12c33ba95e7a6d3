"""A view to show, made of real parts that hold nothing."""

from dataclasses import replace
from time import monotonic
from typing import Any

from kvstore.admin import LAG_BOUNDS_S, MOTION_BOUNDS_S, Histogram, Identity, Motion, View
from kvstore.core import MissReason
from kvstore.index import PublisherStats
from kvstore.policy import Lru
from kvstore.server import ServerStats
from kvstore.store import Store
from kvstore.tiers import Counts, NvmeStats

DEVICE = NvmeStats(
    path="/dev/nvme1n1",
    up=True,
    reason="",
    trips=1,
    objects=3,
    object_bytes=300,
    page_bytes=100,
    pages=50,
    free_pages=40,
    failed_pages=2,
    writing_bytes=0,
    wear_left_bytes=-1,
    counts=Counts(puts=4, put_bytes=400),
)


def motion(*seconds: float) -> Motion:
    histogram = Histogram(MOTION_BOUNDS_S)
    for value in seconds:
        histogram.observe(value)
    return Motion(objects=len(seconds), object_bytes=100 * len(seconds), seconds=histogram.freeze())


def a_view(**changes: Any) -> View:
    """Every label of every metric has at least one value."""
    view = View(
        at_s=monotonic(),
        uptime_s=12.5,
        slept_s=2.0,
        identity=Identity(version="1", node="n", boot="b", control="c", mooncake="m", index="i"),
        store=Store(64, 1 << 20, Lru(), lambda: 0.0).snapshot(),
        refused={MissReason.NO_ROOM: 3},
        pushed=motion(0.02, 0.3),
        pulled=motion(),
        server=ServerStats(
            requests={"Hello": 2},
            busy_s={"Hello": 0.5},
            failures={"bad_request": 1},
            garbage_frames=1,
            lost_replies=0,
            parked=0,
            parked_total=0,
            not_parked=0,
        ),
        publisher=PublisherStats(
            up=True,
            pending_keys=4,
            in_pass=False,
            sent_keys=9,
            sent_batches=2,
            passes=1,
            failures=0,
            losses=0,
            overflows=0,
        ),
        loop_lag_s=Histogram(LAG_BOUNDS_S).freeze(),
        spilled=motion(0.1),
        promoted=motion(),
        devices=(DEVICE,),
    )
    return replace(view, **changes)
