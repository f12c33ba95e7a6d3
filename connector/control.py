"""What the scheduler half asks of the store, as a contract that never blocks.

Questions return futures that the hooks poll; statements are sent and forgotten. `connector.background` keeps
this contract with the real client on a thread of its own; tests keep it with an in-memory node. Clauses:

* Every future ends, within the client's timeouts, with an answer or an exception that says why not.
* Answers to `reserve` and `commit` are in the order asked, one per item.
* `abandon` of an acquire gives back what it may still be promised.
* What a promise has on NVMe comes into DRAM only by `promote`, in order, as far as the node has room; keys that are
  given back make room for others.
* Keys belong to the namespace that was opened last; promises and grants stay with the one they were given in.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvstore.client import NodeAddress
from kvstore.core import Extents, Key, Manifest, MissReason, Tier

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup says: the first `num_keys` are likely to be had; `reason` says why not more."""

    num_keys: int
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Promised:
    """One leased object. On NVMe it has no pages and no table yet, and can be in DRAM in about `eta_s` seconds."""

    key: Key
    node: NodeAddress
    generation: bytes
    extents: Extents
    size_bytes: int
    table: bytes
    tier: Tier = Tier.DRAM
    eta_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """The longest prefix of the asked keys that is leased; `reason` says why not more.

    `handle` is what the client needs to renew and release it.
    """

    objects: tuple[Promised, ...]
    reason: MissReason | None = None
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """The object at `position` of a promise is in DRAM now, as `promised` says; None: nothing from there on will
    come, for `reason`."""

    position: int
    promised: Promised | None
    reason: MissReason | None = None


class Arrivals(Protocol):
    """What of a promise comes from NVMe."""

    @property
    def done(self) -> bool:
        """Whether everything has been taken that will ever come."""

    def take(self) -> Sequence[Arrival]:
        """What has come since the last call. Never waits."""

    def close(self) -> None:
        """Nothing more is wanted."""


@dataclass(frozen=True, slots=True)
class ReserveAsk:
    """One object to be pushed."""

    key: Key
    parent: Key
    depth: int
    size_bytes: int
    cold: bool


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """The right to fill these pages. `handle` is what the client needs to commit or abort it."""

    node: NodeAddress
    generation: bytes
    extents: Extents
    handle: Any = None


@dataclass(frozen=True, slots=True)
class NotGranted:
    """No need or no right to write: `stored` says that the object is there already (at `node`)."""

    stored: bool
    reason: MissReason | None = None
    node: NodeAddress | None = None


@dataclass(frozen=True, slots=True)
class ReportLine:
    """What became of one request's prompt, in tokens: beyond the local prefix cache, promised, pulled, and those of
    the pulled ones that came from NVMe."""

    request: str
    queried_tokens: int
    promised_tokens: int
    pulled_tokens: int
    reason: MissReason | None
    disk_tokens: int = 0


class Control(Protocol):
    """The store, as the scheduler half sees it."""

    def open(self, manifest: Manifest) -> None:
        """From now on everything is about this namespace. Nodes are told when they are first talked to."""

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Runs something slow (files, hashes) off the engine's thread."""

    def lookup(self, keys: Sequence[Key], *, prefetch: bool = False) -> "Future[Found]":
        """How many of a chain's first keys are likely to be had. No lease. `prefetch`: nodes are told that what they
        have of them on NVMe will be asked for."""

    def present(self, keys: Sequence[Key]) -> "Future[Sequence[bool] | None]":
        """Which of these keys, which are no chain, are likely to be had; None: there is nobody who could tell."""

    def acquire(
        self, keys: Sequence[Key], duration_s: float, wait_s: float, nodes: Sequence[str]
    ) -> "Future[Promise]":
        """Leases a chain's keys; `nodes` (ids, in hex) are asked too; `wait_s` waits for commits under way."""

    def abandon(self, future: "Future[Promise]") -> None:
        """Nobody will read the answer to this acquire any more."""

    def renew(self, promise: Promise, duration_s: float) -> "Future[float]":
        """Prolongs a lease; the seconds that it has left now, 0 when it is gone."""

    def promote(self, promise: Promise, timeout_s: float) -> Arrivals:
        """Begins to bring what of a promise is on NVMe into DRAM; what is not there in time ends it."""

    def shorten(self, promise: Promise, keys: Collection[Key], *, cold: bool = False) -> Promise:
        """Gives the leases of these keys back; what is left of the promise. `cold` as for `release`."""

    def release(self, promise: Promise, *, cold: bool = False) -> None:
        """Ends a lease. `cold`: its objects are the first to be evicted, unless others use them."""

    def suspect(self, promise: Promise, promised: Promised, request: str) -> None:
        """The bytes of this object, which is still leased, did not match their table when this request loaded it."""

    def reserve(
        self, items: Sequence[ReserveAsk], duration_s: float
    ) -> "Future[Sequence[Grant | NotGranted]]":
        """Asks for the right to push objects."""

    def commit(self, items: Sequence[tuple[Grant, bytes]]) -> "Future[Sequence[bool]]":
        """Publishes filled objects, given with their tables; False: that one did not become visible."""

    def abort(self, grants: Sequence[Grant], *, quiet: bool) -> None:
        """Gives grants back; `quiet`: nothing can land late."""

    def report(self, lines: Sequence[ReportLine]) -> None:
        """For the node's metrics; best effort."""

    def take_timings(self) -> list[tuple[str, float]]:
        """(stage, seconds) of the questions answered since the last call: lookup, lease, reserve, commit."""

    def close(self) -> None:
        """Ends the thread, within a second."""
