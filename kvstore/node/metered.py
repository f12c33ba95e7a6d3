"""A store that also counts what goes through it: refusals by reason, and how long pushes and pulls take.

The node does not move the bytes, so a push is what lies between a grant and its commit, a pull what lies
between a lease and its release (a reader that gives up looks the same from here). What is never committed
or released is forgotten in time.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvstore.admin import MOTION_BOUNDS_S, Histogram, Motion
from kvstore.core import Key, MissReason, Namespace, limits
from kvstore.policy import Policy
from kvstore.store import Store
from kvstore.wire import (
    Acquire,
    AcquireAnswer,
    ClientId,
    CommitAnswer,
    CommitItem,
    Committed,
    Granted,
    Refused,
    Release,
    ReserveAnswer,
    ReserveItem,
    Resident,
)

UNDER_WAY_MAX = 65_536
LEASES_MAX = 4_096

K = TypeVar("K", bound=Hashable)


class _Begun(NamedTuple):
    at_s: float
    size_bytes: int


class Meter(Generic[K]):
    """Objects in motion in one direction, by what names them; at most `UNDER_WAY_MAX` are remembered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way: OrderedDict[K, _Begun] = OrderedDict()
        self._objects = 0
        self._bytes = 0
        self._seconds = Histogram(MOTION_BOUNDS_S)

    def begin(self, name: K, size_bytes: int) -> None:
        """Bytes may move from now on."""
        self._under_way.setdefault(name, _Begun(self._clock(), size_bytes))
        if len(self._under_way) > UNDER_WAY_MAX:
            self._under_way.popitem(last=False)

    def end(self, name: K) -> None:
        """They have moved. Nothing happens the second time."""
        begun = self._under_way.pop(name, None)
        if begun is not None:
            self._objects += 1
            self._bytes += begun.size_bytes
            self._seconds.observe(self._clock() - begun.at_s)

    def freeze(self) -> Motion:
        """The counts now."""
        return Motion(objects=self._objects, object_bytes=self._bytes, seconds=self._seconds.freeze())


class MeteredStore(Store):
    """A store with meters; answers are those of the store.

    Args:
        page_count, page_bytes, policy, clock, hold_s: the store's.
        on_namespace: is told of every namespace that was opened, with its manifest.
    """

    def __init__(
        self,
        page_count: int,
        page_bytes: int,
        policy: Policy,
        clock: Callable[[], float],
        on_namespace: Callable[[Namespace, bytes], None],
        hold_s: float = limits.HOLD_S,
    ) -> None:
        super().__init__(page_count, page_bytes, policy, clock, hold_s=hold_s)
        self._on_namespace = on_namespace
        self.pushes: Meter[bytes] = Meter(clock)  # by generation
        self.pulls: Meter[tuple[bytes, bytes, bytes]] = Meter(clock)  # by client, lease and key
        self._leased: OrderedDict[tuple[bytes, bytes], list[Key]] = OrderedDict()
        self.refused: dict[MissReason, int] = {}

    def open_namespace(self, namespace: Namespace, manifest_bytes: bytes) -> str:
        """See `Store.open_namespace`."""
        advice = super().open_namespace(namespace, manifest_bytes)
        self._on_namespace(namespace, manifest_bytes)
        return advice

    def reserve(
        self, client: ClientId, namespace: Namespace, items: Sequence[ReserveItem], duration_s: float
    ) -> tuple[ReserveAnswer, ...]:
        """See `Store.reserve`."""
        answers = super().reserve(client, namespace, items, duration_s)
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, Granted):
                self.pushes.begin(answer.generation, item.size_bytes)
            elif isinstance(answer, Refused):
                self.refused[answer.reason] = self.refused.get(answer.reason, 0) + 1
        return answers

    def commit(
        self, client: ClientId, namespace: Namespace, items: Sequence[CommitItem]
    ) -> tuple[CommitAnswer, ...]:
        """See `Store.commit`."""
        answers = super().commit(client, namespace, items)
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, Committed):
                self.pushes.end(item.generation)
        return answers

    def acquire(self, client: ClientId, request: Acquire) -> tuple[AcquireAnswer, ...]:
        """See `Store.acquire`."""
        answers = super().acquire(client, request)
        leased = self._leased.setdefault((client, request.lease), [])
        for key, answer in zip(request.keys, answers, strict=False):  # a prefix may be cut short
            if isinstance(answer, Resident):
                self.pulls.begin((client, request.lease, key), answer.size_bytes)
                leased.append(key)
        if len(self._leased) > LEASES_MAX:
            self._leased.popitem(last=False)
        return answers

    def release(self, client: ClientId, request: Release) -> None:
        """See `Store.release`."""
        super().release(client, request)
        for key in request.keys or self._leased.pop((client, request.lease), ()):
            self.pulls.end((client, request.lease, key))
