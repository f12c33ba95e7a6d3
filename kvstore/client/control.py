"""The conversation with one node: says Hello when it must, notices new boots, gives every call a deadline.

A node that restarts has a new boot id in its next reply. Then everything learnt from the old boot (address,
greeted namespaces) is void; Hello is said again by itself, and the request once more. Generations and
leases of the old boot need no care here: the new one answers them with Stale and with misses.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from kvstore.client.address import NodeAddress
from kvstore.client.link import Link
from kvstore.core import BadRequest, Namespace, NotAuthorised, Overloaded, PeerLost
from kvstore.wire import (
    BootId,
    ClientId,
    Failed,
    Hello,
    Reply,
    ReplyBody,
    RequestBody,
    Welcome,
)

REFUSALS = (BadRequest, NotAuthorised, Overloaded)
"""A node's answers that concern the request as a whole: it is there, but will not do it."""
TROUBLE = (PeerLost, *REFUSALS)
"""Every way in which one node cannot be used now; callers go on without it."""

Undo = Callable[[ReplyBody], RequestBody | None]
"""What takes back the effect of a call whose caller has gone, given the reply that came too late."""


class Answer(NamedTuple):
    """A reply's body, and the boot that gave it."""

    body: ReplyBody
    address: NodeAddress


class ControlClient:
    """Calls one node. Made and used on one running loop.

    Args:
        control: the node's control endpoint, "host:port".
        client: names this process.
        token: the shared secret, or empty.
        manifests: encoded manifests of the namespaces in use, read whenever Hello is due.

    Raises:
        BadConfiguration: `control` is no address.
    """

    def __init__(
        self,
        control: str,
        client: ClientId,
        token: bytes = b"",
        *,
        manifests: Mapping[Namespace, bytes] | None = None,
    ) -> None:
        self.control = control
        self.address: NodeAddress | None = None
        self.welcome: Welcome | None = None
        self.boots_seen = 0
        self._manifests = {} if manifests is None else manifests
        self._link = Link(control, client, token)
        self._boot: BootId | None = None
        self._greeted: set[Namespace] = set()
        self._greeting = asyncio.Lock()

    async def hello(self, timeout_s: float) -> Welcome:
        """The node's facts, asked anew.

        Raises:
            PeerLost: no answer in time. Else one of `REFUSALS`: it answered that it will not talk.
        """
        async with _deadline(self.control, timeout_s):
            return await self._hello(None)

    async def ask(
        self,
        body: RequestBody,
        timeout_s: float,
        *,
        namespace: Namespace | None = None,
        undo: Undo | None = None,
    ) -> Answer:
        """Sends one request and returns its answer within `timeout_s`, Hellos included.

        Args:
            body: what is asked.
            timeout_s: seconds from now until the caller gives up.
            namespace: the namespace that the node must know before it can answer.
            undo: makes the request that takes this one back, if its reply comes when nobody waits any more.

        Raises:
            PeerLost: no answer in time, or the node failed at it.
            BadRequest, NotAuthorised, Overloaded: the node refused the request as a whole.
        """
        async with _deadline(self.control, timeout_s):
            for _ in range(2):
                await self._greet(namespace)
                reply = await self._exchange(body, undo)
                if isinstance(reply.body, Failed) and reply.body.code == "namespace_unknown":
                    self._greeted.clear()
                    continue
                await self._greet(None)  # a reply of a new boot: learn its address
                if self.address is not None and self.address.boot == reply.boot:
                    return Answer(checked(reply.body, self.control), self.address)
            raise PeerLost(f"node {self.control} restarts faster than it answers")

    def post(self, body: RequestBody) -> bool:
        """Sends a request best effort: nobody waits for its reply. False: there is no connection."""
        return self._link.post(body)

    def close(self) -> None:
        """Ends the connection."""
        self._link.close()

    async def _greet(self, namespace: Namespace | None) -> None:
        """Says Hello if this boot has not been greeted, or not for this namespace."""
        if self.address is not None and (namespace is None or namespace in self._greeted):
            return
        async with self._greeting:
            if self.address is None or (namespace is not None and namespace not in self._greeted):
                await self._hello(namespace)

    async def _hello(self, namespace: Namespace | None) -> Welcome:
        manifest = b"" if namespace is None else self._manifests.get(namespace, b"")
        if namespace is not None and not manifest:
            raise BadRequest(f"namespace {namespace.hex()[:16]} has not been opened with this client")
        reply = await self._exchange(Hello(namespace or b"", manifest), None)
        welcome = checked(reply.body, self.control)
        if not isinstance(welcome, Welcome):
            raise BadRequest(f"node {self.control} answered Hello with {type(welcome).__name__}")
        self.welcome = welcome
        self.address = NodeAddress(
            node=welcome.node,
            boot=reply.boot,
            control=self.control,
            segments=welcome.transfer | ({"shm": welcome.memfd_socket} if welcome.memfd_socket else {}),
            arena_base=welcome.arena_base,
            page_bytes=welcome.page_bytes,
        )
        if namespace is not None:
            self._greeted.add(namespace)
        return welcome

    async def _exchange(self, body: RequestBody, undo: Undo | None) -> Reply:
        reply = await self._link.ask(body, None if undo is None else partial(self._take_back, undo))
        if reply.boot != self._boot:
            self._boot = reply.boot
            self.boots_seen += 1
            self.address = None
            self._greeted.clear()
        return reply

    def _take_back(self, undo: Undo, late: Reply) -> None:
        body = undo(late.body)
        if body is not None:
            self._link.post(body)


def checked(body: ReplyBody, control: str) -> ReplyBody:
    """The body, unless the node refused the request.

    Raises:
        NotAuthorised, BadRequest, Overloaded, PeerLost: by the code of `Failed`.
    """
    if not isinstance(body, Failed):
        return body
    message = f"node {control}: {body.message}"
    match body.code:
        case "not_authorised":
            raise NotAuthorised(message)
        case "version" | "bad_request" | "too_large":
            raise BadRequest(message)
        case "overloaded":
            raise Overloaded(message)
        case _:
            raise PeerLost(message)


@asynccontextmanager
async def _deadline(control: str, timeout_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout` that says which node was too slow."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise PeerLost(f"node {control} did not answer within {timeout_s:g} s") from error
