"""A store that also counts what goes through it: refusals by reason, and how long pushes and pulls take.

The node does not move the bytes, so a push is what lies between a grant and its commit, a pull what lies
between a lease and the release of its objects (a reader that gives up looks the same from here). What is never
committed is forgotten in time.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvstore.admin import MOTION_BOUNDS_S, Histogram, Motion
from kvstore.core import MissReason, Namespace, limits
from kvstore.policy import Policy
from kvstore.store import GivenBack, Job, Spill, Steps, Store, Tiering
from kvstore.wire import (
    ClientId,
    CommitAnswer,
    CommitItem,
    Committed,
    Generation,
    Granted,
    Refused,
    Release,
    ReserveAnswer,
    ReserveItem,
)

UNDER_WAY_MAX = 65_536


class Meter:
    """What has moved in one direction, and how long that took."""

    def __init__(self) -> None:
        self._objects = 0
        self._bytes = 0
        self._seconds = Histogram(MOTION_BOUNDS_S)

    def freeze(self) -> Motion:
        """The counts now."""
        return Motion(objects=self._objects, object_bytes=self._bytes, seconds=self._seconds.freeze())

    def moved(self, size_bytes: int, seconds: float) -> None:
        """An object has moved, in so many seconds."""
        self.moved_together((size_bytes,), seconds)

    def moved_together(self, sizes_bytes: Sequence[int], seconds: float) -> None:
        """Objects have moved, all in the same seconds."""
        self._objects += len(sizes_bytes)
        self._bytes += sum(sizes_bytes)
        self._seconds.observe(seconds, len(sizes_bytes))


class Pushes(Meter):
    """Objects between grant and commit, by generation; at most `UNDER_WAY_MAX` are remembered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._under_way: OrderedDict[Generation, tuple[float, int]] = OrderedDict()  # when it began, size

    def begin(self, granted: Iterable[tuple[Generation, int]]) -> None:
        """Bytes of these objects, named with their sizes, may move from now on."""
        now_s = self._clock()
        for generation, size_bytes in granted:
            self._under_way.setdefault(generation, (now_s, size_bytes))
        while len(self._under_way) > UNDER_WAY_MAX:
            self._under_way.popitem(last=False)

    def end(self, committed: Iterable[Generation]) -> None:
        """They have moved. Nothing happens the second time."""
        now_s = self._clock()
        for generation in committed:
            if (begun := self._under_way.pop(generation, None)) is not None:
                self.moved(begun[1], now_s - begun[0])


class MeteredStore(Store):
    """A store with meters; answers are those of the store.

    Args:
        page_count, page_bytes, policy, clock, hold_s, tiering: the store's.
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
        *,
        tiering: Tiering | None = None,
    ) -> None:
        super().__init__(page_count, page_bytes, policy, clock, hold_s=hold_s, tiering=tiering)
        self._on_namespace = on_namespace
        self.pushes = Pushes(clock)
        self.pulls = Meter()
        self.spills = Meter()
        self.promotions = Meter()
        self.refused: dict[MissReason, int] = {}

    def carried(self, job: Job, seconds: float) -> None:
        """A copy has come to the other tier."""
        meter = self.spills if isinstance(job, Spill) else self.promotions
        meter.moved(job.object.size_bytes, seconds)

    def open_namespace(self, namespace: Namespace, manifest_bytes: bytes) -> str:
        """See `Store.open_namespace`."""
        advice = super().open_namespace(namespace, manifest_bytes)
        self._on_namespace(namespace, manifest_bytes)
        return advice

    def reserving(
        self, client: ClientId, namespace: Namespace, items: Sequence[ReserveItem], duration_s: float
    ) -> Steps[tuple[ReserveAnswer, ...]]:
        """See `Store.reserving`."""
        answers = yield from super().reserving(client, namespace, items, duration_s)
        answered = list(zip(items, answers, strict=True))
        self.pushes.begin((a.generation, item.size_bytes) for item, a in answered if isinstance(a, Granted))
        for answer in answers:
            if isinstance(answer, Refused):
                self.refused[answer.reason] = self.refused.get(answer.reason, 0) + 1
        return answers

    def commit(
        self, client: ClientId, namespace: Namespace, items: Sequence[CommitItem]
    ) -> tuple[CommitAnswer, ...]:
        """See `Store.commit`."""
        answers = super().commit(client, namespace, items)
        answered = zip(items, answers, strict=True)
        self.pushes.end(item.generation for item, answer in answered if isinstance(answer, Committed))
        return answers

    def release(self, client: ClientId, request: Release) -> GivenBack:
        """See `Store.release`."""
        given_back = super().release(client, request)
        self.pulls.moved_together(given_back.sizes_bytes, given_back.leased_s)
        return given_back
