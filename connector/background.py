"""The real control: the async client on a loop in a thread of its own.

Hooks hand over coroutines and get futures that they poll; nothing of the client is touched by two threads.
Every call of the client has its own deadline and gives back what it took when it is cancelled, so nothing
here waits. The thread is a daemon: an engine that is killed needs no farewell, since everything that is held
has a duration.
"""

from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import Any, TypeVar

import msgspec

from connector.compat import logger
from connector.control import Arrival, Found, Grant, NotGranted, Promise, Promised, ReportLine, ReserveAsk
from kvstore.client import (
    Arrivals,
    Client,
    ClientConfig,
    Committed,
    Copy,
    Exists,
    LoopThread,
    NodeId,
    OnDisk,
    Refused,
    ReportItem,
    ReserveItem,
)
from kvstore.client import Grant as ClientGrant
from kvstore.client import Promise as ClientPromise
from kvstore.core import BadRequest, Extent, Key, KVStoreError, Manifest, Namespace, NotAuthorised, Tier

log = logger(__name__)

T = TypeVar("T")
CLOSE_S = 1.0
TIMINGS_MAX = 4_096
SLOW_THREADS = 2


class Background:
    """Keeps the contract of `connector.control.Control`."""

    def __init__(self, config: ClientConfig) -> None:
        self._namespace: Namespace | None = None
        self._slow = ThreadPoolExecutor(SLOW_THREADS, "kvstore-files")
        self._telling: set[Future[Any]] = set()
        self._timings: deque[tuple[str, float]] = deque(maxlen=TIMINGS_MAX)  # filled by the other thread
        self._client = Client(config)
        self._loop = LoopThread("kvstore-control")
        self._closed = False
        self._tell(self._client.start())

    def _ask(self, stage: str, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs work whose answer is waited for; how long that takes is noted."""

        async def timed() -> T:
            began = monotonic()
            try:
                return await work
            finally:
                self._timings.append((stage, monotonic() - began))

        return self._loop.submit(timed())

    def _tell(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work whose outcome nobody reads; what it raises is one line."""
        told = self._loop.submit(work)
        self._telling.add(told)
        told.add_done_callback(self._told)

    def _told(self, told: "Future[Any]") -> None:
        self._telling.discard(told)
        error = None if told.cancelled() else told.exception()
        if isinstance(error, KVStoreError):
            log.info("%s", error)
        elif error is not None:
            log.error("internal error in the conversation with the store: %r", error)

    # --- the contract ---------------------------------------------------------------------------------

    def open(self, manifest: Manifest) -> None:
        """See `Control.open`."""
        self._namespace = manifest.namespace
        self._tell(self._open(manifest))

    async def _open(self, manifest: Manifest) -> None:
        try:
            await self._client.open(manifest)
        except (BadRequest, NotAuthorised) as error:
            log.warning("the store refuses this engine: %s", error)

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """See `Control.call`."""
        return self._slow.submit(work)

    def lookup(self, keys: Sequence[Key], *, prefetch: bool = False) -> "Future[Found]":
        """See `Control.lookup`."""
        return self._ask("lookup", self._lookup(self._opened, keys, prefetch))

    async def _lookup(self, namespace: Namespace, keys: Sequence[Key], prefetch: bool) -> Found:
        found = await self._client.lookup(namespace, keys)
        if prefetch and found.on_disk:
            self._tell(self._client.prefetch(namespace, keys[: found.num_keys]))
        return Found(found.num_keys, found.reason)

    def present(self, keys: Sequence[Key]) -> "Future[Sequence[bool] | None]":
        """See `Control.present`."""
        return self._loop.submit(self._present(self._opened, keys))

    async def _present(self, namespace: Namespace, keys: Sequence[Key]) -> Sequence[bool] | None:
        return await self._client.present(namespace, keys)

    def acquire(
        self, keys: Sequence[Key], duration_s: float, wait_s: float, nodes: Sequence[str]
    ) -> "Future[Promise]":
        """See `Control.acquire`."""
        first = [NodeId(bytes.fromhex(node)) for node in nodes if _is_hex(node)]
        return self._ask("lease", self._acquire(self._opened, keys, duration_s, wait_s, first))

    async def _acquire(
        self,
        namespace: Namespace,
        keys: Sequence[Key],
        duration_s: float,
        wait_s: float,
        first: Sequence[NodeId],
    ) -> Promise:
        promise = await self._client.acquire(namespace, keys, duration_s, wait_s=wait_s, first=first)
        return Promise(tuple(_promised(copy) for copy in promise.copies), promise.reason, promise)

    def abandon(self, future: "Future[Promise]") -> None:
        """See `Control.abandon`. The client gives back what a cancelled call had taken."""
        if not future.cancel():
            future.add_done_callback(self._give_back)

    def _give_back(self, future: "Future[Promise]") -> None:
        if not future.cancelled() and future.exception() is None:
            self.release(future.result())

    def renew(self, promise: Promise, duration_s: float) -> "Future[float]":
        """See `Control.renew`."""
        return self._loop.submit(self._client.renew(promise.handle, duration_s))

    def promote(self, promise: Promise, timeout_s: float) -> "Coming":
        """See `Control.promote`."""
        copies = promise.handle.copies[: len(promise.objects)]
        wanted = msgspec.structs.replace(promise.handle, copies=copies)
        return Coming(Arrivals(self._loop, self._client, wanted, timeout_s))

    def shorten(self, promise: Promise, keys: Collection[Key], *, cold: bool = False) -> Promise:
        """See `Control.shorten`."""
        gone = set(keys)
        self._tell(self._client.release(promise.handle, tuple(gone), cold=cold))
        copies = tuple(copy for copy in promise.handle.copies if copy.key not in gone)
        return Promise(
            tuple(one for one in promise.objects if one.key not in gone),
            promise.reason,
            msgspec.structs.replace(promise.handle, copies=copies),
        )

    def release(self, promise: Promise, *, cold: bool = False) -> None:
        """See `Control.release`."""
        if promise.objects:
            self._tell(self._client.release(promise.handle, cold=cold))

    def suspect(self, promise: Promise, promised: Promised, request: str) -> None:
        """See `Control.suspect`."""
        self._tell(self._suspect(promise.handle, promised.key, promised.generation, request))

    async def _suspect(self, promise: ClientPromise, key: Key, generation: bytes, request: str) -> None:
        copy = next(copy for copy in promise.copies if copy.key == key)
        read = msgspec.structs.replace(copy.answer, generation=generation)
        copy = msgspec.structs.replace(copy, answer=read)
        bad = await self._client.suspect(promise.namespace, copy)
        log.warning(
            "request %s: node %s: the bytes of key %s did not match their checksums; %s",
            request,
            copy.address.control,
            key.hex()[:16],
            "the copy was bad and is dropped"
            if bad
            else "the node's copy is good: they were damaged on the way",
        )

    def reserve(
        self, items: Sequence[ReserveAsk], duration_s: float
    ) -> "Future[Sequence[Grant | NotGranted]]":
        """See `Control.reserve`."""
        asked = [ReserveItem(i.key, i.parent, i.depth, i.size_bytes, i.cold) for i in items]
        return self._ask("reserve", self._reserve(self._opened, asked, duration_s))

    async def _reserve(
        self, namespace: Namespace, items: Sequence[ReserveItem], duration_s: float
    ) -> Sequence[Grant | NotGranted]:
        grants = await self._client.reserve(namespace, items, duration_s)
        return [_granted(namespace, grant) for grant in grants.grants]

    def commit(self, items: Sequence[tuple[Grant, bytes]]) -> "Future[Sequence[bool]]":
        """See `Control.commit`."""
        namespace = items[0][0].handle[0]
        filled = [(grant.handle[1], table) for grant, table in items]
        return self._ask("commit", self._commit(namespace, filled))

    async def _commit(
        self, namespace: Namespace, items: Sequence[tuple[ClientGrant, bytes]]
    ) -> Sequence[bool]:
        return [isinstance(answer, Committed) for answer in await self._client.commit(namespace, items)]

    def abort(self, grants: Sequence[Grant], *, quiet: bool) -> None:
        """See `Control.abort`."""
        namespace = grants[0].handle[0]
        self._tell(self._client.abort(namespace, [grant.handle[1] for grant in grants], quiet=quiet))

    def report(self, lines: Sequence[ReportLine]) -> None:
        """See `Control.report`."""
        items = [
            ReportItem(
                line.request,
                line.queried_tokens,
                line.promised_tokens,
                line.pulled_tokens,
                line.reason,
                line.disk_tokens,
            )
            for line in lines
        ]
        self._tell(self._client.report(items))

    def take_timings(self) -> list[tuple[str, float]]:
        """See `Control.take_timings`."""
        return [self._timings.popleft() for _ in range(len(self._timings))]

    def close(self) -> None:
        """See `Control.close`: lets what was said last be sent, then ends everything."""
        if self._closed:
            return
        self._closed = True
        self._slow.shutdown(wait=False, cancel_futures=True)
        wait(self._telling.copy(), CLOSE_S / 2)
        try:
            self._loop.submit(self._client.close()).result(CLOSE_S / 2)
        except TimeoutError:
            log.info("the conversation with the store was cut off; what is held there ends by itself")
        self._loop.stop()

    @property
    def _opened(self) -> Namespace:
        assert self._namespace is not None, "nothing may be asked before a namespace was opened"
        return self._namespace


class Coming:
    """Keeps the contract of `connector.control.Arrivals`."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    @property
    def done(self) -> bool:
        """See `Arrivals.done`."""
        return self._arrivals.done

    def take(self) -> Sequence[Arrival]:
        """See `Arrivals.take`."""
        return [
            Arrival(one.position, None if one.copy is None else _promised(one.copy), one.reason)
            for one in self._arrivals.take()
        ]

    def close(self) -> None:
        """See `Arrivals.close`."""
        self._arrivals.close()


def _promised(copy: Copy) -> Promised:
    answer = copy.answer
    if isinstance(answer, OnDisk):
        place = (copy.key, copy.address, answer.generation, (), answer.size_bytes, b"")
        return Promised(*place, tier=Tier.NVME, eta_s=answer.eta_s)
    extents = tuple(Extent(*extent) for extent in answer.extents)
    return Promised(copy.key, copy.address, answer.generation, extents, answer.size_bytes, answer.table)


def _granted(namespace: Namespace, grant: ClientGrant) -> Grant | NotGranted:
    if grant.granted is not None and grant.address is not None:
        extents = tuple(Extent(*extent) for extent in grant.granted.extents)
        return Grant(grant.address, grant.granted.generation, extents, (namespace, grant))
    reason = grant.answer.reason if isinstance(grant.answer, Refused) else None
    return NotGranted(isinstance(grant.answer, Exists), reason, grant.address)


def _is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and all(letter in "0123456789abcdef" for letter in text)
