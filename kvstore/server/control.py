"""The control endpoint of a node: one request frame in, one reply frame out.

Nothing that a client sends ends the loop or slows another client for long: frames are bounded at the
socket, decoding is bounded by the message types, a failure inside one request is answered, logged and
counted, and what has to wait is parked, a bounded number per client.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from time import perf_counter

from kvstore.core import BadRequest, KVStoreError, NamespaceUnknown, NotAuthorised, Overloaded, limits
from kvstore.server.calls import Calls, Verifier, given_back, lease_of
from kvstore.server.endpoint import Endpoint, Peer
from kvstore.server.parking import Parking
from kvstore.server.stats import Counters, ServerStats
from kvstore.server.turns import Rest
from kvstore.store import Steps, Store
from kvstore.wire import (
    VERSION,
    VERSIONS_SPOKEN,
    BootId,
    Failed,
    Reply,
    ReplyBody,
    ReplyEncoder,
    Request,
    Welcome,
    decode_envelope,
    decode_request,
)

log = logging.getLogger(__name__)

CODES: dict[type[KVStoreError], str] = {
    NamespaceUnknown: "namespace_unknown",
    NotAuthorised: "not_authorised",
    BadRequest: "bad_request",
    Overloaded: "overloaded",
}
Respond = Callable[[ReplyBody], None]


class ControlServer:
    """Serves a store to its clients.

    Args:
        store: the node's store; every call on it happens on the loop.
        verifier: verifies suspected copies off the loop (the store's mover).
        welcome: builds the answer to Hello; versions, limits and advice are filled in here.
        boot: this start of the node; in every reply.
        listen: "host:port" to bind; `address` is what was bound.
        token: shared secret that every request must carry; empty: none is asked for.
        clock: the node's loop clock, in seconds.
    """

    def __init__(
        self,
        store: Store,
        verifier: Verifier,
        welcome: Callable[[], Welcome],
        *,
        boot: BootId,
        listen: str,
        token: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._parking = Parking()
        self._calls = Calls(store, verifier, welcome, self._parking, clock)
        self._counters = Counters()
        self._endpoint = Endpoint(listen, self._receive, self._count_garbage)
        self._boot = boot
        self._encoder = ReplyEncoder()
        self._token = token

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            BadConfiguration: the address is taken (says by whom) or cannot be bound.
        """
        await self._endpoint.start()

    async def stop(self) -> None:
        """Takes no more requests, answers the parked ones with what is true now, gives the port back."""
        self._endpoint.stop_reading()
        await self._parking.close()
        await self._endpoint.close()

    @property
    def address(self) -> str:
        """The bound "host:port"."""
        return self._endpoint.address

    @property
    def stats(self) -> ServerStats:
        """A frozen picture of the counters."""
        return self._counters.freeze(len(self._parking), self._parking.total, self._parking.refused)

    def _receive(self, peer: Peer, frame: bytes) -> Rest | None:
        try:
            request = decode_request(frame)
        except BadRequest as error:
            self._answer_unreadable(peer, frame, error)
            return None
        respond = partial(self._reply, peer, request.version, request.request_id)
        return self._handle(request, respond, self._dispatch(request, respond), 0.0)

    def _handle(self, request: Request, respond: Respond, steps: Steps[None], taken_s: float) -> Rest | None:
        """The next step; what is left after it."""
        started = perf_counter()
        try:
            if next(steps, True) is None:  # a stop; its end would be the default
                return partial(self._handle, request, respond, steps, taken_s + perf_counter() - started)
        except Exception as error:  # noqa: BLE001 -- answered and counted; the other clients go on
            respond(self._failure(request, error))
        self._counters.request(type(request.body).__name__, taken_s + perf_counter() - started)
        return None

    def _dispatch(self, request: Request, respond: Respond) -> Steps[None]:
        if request.version not in VERSIONS_SPOKEN:
            respond(_version_failure(request.version))
            return
        if self._token and not hmac.compare_digest(request.token, self._token):
            raise NotAuthorised("the request carries no valid token: set the node's token in the client")
        answer = self._calls.answer(request)
        if isinstance(answer, Generator):
            respond((yield from answer))
        elif isinstance(answer, Coroutine):
            ended = partial(self._respond_later, request, respond)
            self._parking.park(request.client, lease_of(request), answer, ended)
        else:
            respond(answer)

    def _respond_later(self, request: Request, respond: Respond, ended: asyncio.Task[ReplyBody]) -> None:
        if ended.cancelled():  # the lease was released: the wait is over, the reply still goes out
            respond(given_back(request))
        elif isinstance(error := ended.exception(), Exception):
            respond(self._failure(request, error))
        else:
            respond(ended.result())

    def _failure(self, request: Request, error: Exception) -> Failed:
        if isinstance(error, KVStoreError):
            return Failed(CODES.get(type(error), "internal"), str(error))
        log.error("%s failed: a bug of the node", type(request.body).__name__, exc_info=error)
        return Failed("internal", f"the node failed at this request: {type(error).__name__}; see its log")

    def _answer_unreadable(self, peer: Peer, frame: bytes, error: BadRequest) -> None:
        try:
            envelope = decode_envelope(frame)
        except BadRequest:
            self._count_garbage()
            return
        if envelope.version in VERSIONS_SPOKEN:
            failure = Failed("bad_request", str(error))
        else:
            failure = _version_failure(envelope.version)
        self._reply(peer, envelope.version, envelope.request_id, failure)

    def _reply(self, peer: Peer, version: int, request_id: int, body: ReplyBody) -> None:
        spoken = version if version in VERSIONS_SPOKEN else VERSION
        frame = self._encoder.encode(Reply(spoken, self._boot, request_id, body))
        if len(frame) > limits.FRAME_BYTES_MAX:
            body = Failed(
                "too_large", f"the reply would have {len(frame) >> 20} MiB: ask for fewer keys at once"
            )
            frame = self._encoder.encode(Reply(spoken, self._boot, request_id, body))
        if isinstance(body, Failed):
            self._counters.failures[body.code] += 1
        if not self._endpoint.send(peer, frame):
            self._counters.lost_replies += 1

    def _count_garbage(self) -> None:
        self._counters.garbage_frames += 1


def _version_failure(version: int) -> Failed:
    spoken = ", ".join(str(number) for number in VERSIONS_SPOKEN)
    return Failed(
        "version", f"this node speaks version {spoken} of the protocol, not {version}: update one side"
    )
