"""What the control loop publishes for the admin thread: one frozen picture of the node."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvstore.admin.histogram import FrozenHistogram
from kvstore.core import MissReason
from kvstore.index import PublisherStats
from kvstore.store import ObjectView, Snapshot
from kvstore.tiers import NvmeStats


class ServerCounts(Protocol):
    """What the control endpoint counts: the server's stats, seen from a room that does not know the server."""

    @property
    def requests(self) -> Mapping[str, int]:
        """Per call."""

    @property
    def busy_s(self) -> Mapping[str, float]:
        """Time on the loop, per call."""

    @property
    def failures(self) -> Mapping[str, int]:
        """Per code."""

    @property
    def garbage_frames(self) -> int:
        """Dropped without an answer."""

    @property
    def lost_replies(self) -> int:
        """Nobody took them."""

    @property
    def parked(self) -> int:
        """Requests that wait now."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What does not change while the node runs. Addresses are "host:port"."""

    version: str
    node: str
    boot: str
    control: str
    mooncake: str
    index: str


@dataclass(frozen=True, kw_only=True)
class Motion:
    """Objects that moved. Those pushed or pulled only as far as the node can see: it does not move their bytes.

    A push is counted at its commit and lasts from the grant on; a pull is counted at its release and lasts from
    the lease on. A reader that gives up looks the same from here; `Totals.hit_tokens` is what was really used.
    """

    objects: int
    object_bytes: int
    seconds: FrozenHistogram


@dataclass(frozen=True, kw_only=True)
class View:
    """The node at one moment.

    `at_s` is of time.monotonic, `slept_s` is what the process was stopped for, `refused` counts refused
    reservations, `redis_restarts` those of an embedded Redis.
    """

    at_s: float
    uptime_s: float
    slept_s: float
    identity: Identity
    store: Snapshot
    refused: Mapping[MissReason, int]
    pushed: Motion
    pulled: Motion
    server: ServerCounts
    publisher: PublisherStats
    loop_lag_s: FrozenHistogram
    spilled: Motion
    promoted: Motion
    devices: tuple[NvmeStats, ...] = ()
    redis_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class ObjectsPage:
    """Some objects; ask with `cursor` for the following ones, None after the last."""

    objects: tuple[ObjectView, ...]
    cursor: int | None
