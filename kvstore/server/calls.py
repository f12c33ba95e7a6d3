"""What each call does: a request in, the reply's body out, now or later.

Handlers are plain functions of (client, body). One that returns a coroutine answers later; `ControlServer`
parks it. One that returns steps answers when they are done, and others are answered between them. What a
handler raises becomes a `Failed` there.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, cast

import msgspec

from kvstore.core import MissReason, Namespace, limits
from kvstore.server.parking import Parking
from kvstore.server.waiting import Answers, acquire_waiting, first_to_come, pages_waiting, worth_waiting
from kvstore.store import Steps, Store
from kvstore.wire import (
    VERSIONS_SPOKEN,
    Abort,
    Acquire,
    AcquireAnswer,
    Acquired,
    ClientId,
    Commit,
    CommitDone,
    Done,
    Drop,
    Hello,
    LeaseId,
    LeaseState,
    Miss,
    Pages,
    Prefetch,
    Release,
    Renew,
    ReplyBody,
    Report,
    Request,
    Reserve,
    Reserved,
    Suspect,
    Verdict,
    Welcome,
)

log = logging.getLogger(__name__)

Later = Coroutine[None, None, ReplyBody]
NO_LEASE = LeaseId(b"")


class Verifier(Protocol):
    """What checks a suspected copy off the loop: the store's mover."""

    def suspect(self, client: ClientId, request: Suspect) -> Awaitable[bool]:
        """Whether the leased copy was bad (and has been dropped). Pinned at once: its lease may end meanwhile."""


class Calls:
    """The handlers of every request body."""

    def __init__(
        self,
        store: Store,
        verifier: Verifier,
        welcome: Callable[[], Welcome],
        parking: Parking,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._verifier = verifier
        self._welcome = welcome
        self._parking = parking
        self._clock = clock
        self._advised: set[Namespace] = set()
        self._handlers: dict[type, Callable[[ClientId, Any], ReplyBody | Later | Steps[ReplyBody]]] = {
            Hello: self._hello,
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Acquire: self._acquire,
            Pages: self._pages,
            Renew: self._renew,
            Release: self._release,
            Prefetch: self._prefetch,
            Suspect: self._suspect,
            Report: self._report,
            Drop: self._drop,
        }

    def answer(self, request: Request) -> ReplyBody | Later | Steps[ReplyBody]:
        """The reply's body, or the coroutine that will give it, or the steps to it.

        Raises:
            BadRequest, NamespaceUnknown, Overloaded: the request as a whole is refused.
        """
        return self._handlers[type(request.body)](request.client, request.body)

    def _hello(self, client: ClientId, body: Hello) -> Welcome:
        welcome = self._welcome()
        advice = welcome.advice
        if body.namespace or body.manifest:
            namespace = Namespace(body.namespace)
            advice = self._store.open_namespace(namespace, body.manifest) or advice
            if advice and namespace not in self._advised:
                self._advised.add(namespace)
                log.warning("namespace %s: %s", namespace.hex()[:16], advice)
        return msgspec.structs.replace(
            welcome,
            versions=VERSIONS_SPOKEN,
            batch_keys_max=limits.BATCH_KEYS_MAX,
            lease_s_max=limits.LEASE_S_MAX,
            advice=advice,
        )

    def _reserve(self, client: ClientId, body: Reserve) -> Steps[Reserved]:
        return Reserved(
            (yield from self._store.reserving(client, body.namespace, body.items, body.duration_s))
        )

    def _commit(self, client: ClientId, body: Commit) -> CommitDone:
        return CommitDone(self._store.commit(client, body.namespace, body.items))

    def _abort(self, client: ClientId, body: Abort) -> Done:
        self._store.abort(client, body.namespace, body.items, body.quiet)
        return Done()

    def _acquire(self, client: ClientId, body: Acquire) -> Acquired | Later:
        answers = self._store.acquire(client, body)
        if not body.wait_s or not worth_waiting(answers) or not self._parking.has_room(client):
            return acquired(answers)
        bounded = msgspec.structs.replace(body, wait_s=min(body.wait_s, limits.WAIT_S_MAX))

        async def later() -> Acquired:
            return acquired(
                await acquire_waiting(self._store, self._parking, self._clock, client, bounded, answers)
            )

        return later()

    def _pages(self, client: ClientId, body: Pages) -> Acquired | Later:
        answers = self._store.pages(client, body)
        if not body.wait_s or first_to_come(answers) is None or not self._parking.has_room(client):
            return acquired(answers)
        bounded = msgspec.structs.replace(body, wait_s=min(body.wait_s, limits.WAIT_S_MAX))

        async def later() -> Acquired:
            return acquired(
                await pages_waiting(self._store, self._parking, self._clock, client, bounded, answers)
            )

        return later()

    def _renew(self, client: ClientId, body: Renew) -> LeaseState:
        return LeaseState(self._store.renew(client, body))

    def _release(self, client: ClientId, body: Release) -> Done:
        if not body.keys:
            self._parking.release(client, body.lease)
        self._store.release(client, body)
        return Done()

    def _prefetch(self, client: ClientId, body: Prefetch) -> Done:
        self._store.prefetch(client, body)
        return Done()

    def _suspect(self, client: ClientId, body: Suspect) -> Later | Verdict:
        if not self._parking.has_room(client):
            return Verdict(bad=False)
        verdict = self._verifier.suspect(client, body)

        async def later() -> Verdict:
            return Verdict(await verdict)

        return later()

    def _report(self, client: ClientId, body: Report) -> Done:
        self._store.report(client, body)
        return Done()

    def _drop(self, client: ClientId, body: Drop) -> Done:
        self._store.drop(client, body)
        return Done()


def acquired(answers: Answers) -> Acquired:
    """The reply with these answers: in its frame one that was prepared looks like the others."""
    return Acquired(cast("tuple[AcquireAnswer, ...]", answers))


def given_back(request: Request) -> Acquired:
    """The reply to a parked request whose lease was released meanwhile: nothing is promised."""
    count = len(request.body.keys) if isinstance(request.body, Pages) else 1
    return Acquired((Miss(MissReason.EXPIRED),) * count)


def lease_of(request: Request) -> LeaseId:
    """The lease with which a parked request ends; none for those that end by themselves."""
    return request.body.lease if isinstance(request.body, Acquire | Pages) else NO_LEASE
