"""The control socket: connections that carry frames, on an asyncio loop.

What comes is cut into frames one at a time, of each peer in turn, and only as many as may wait (see `turns`); the
rest stays in its connection, which is then not read from. So a peer that floods the node waits behind itself. Frames
are handled for a bounded share of the loop's time: then timers get their turn, and what has come meanwhile is read.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable

from kvstore.core import BadConfiguration, BadRequest
from kvstore.server.port import port_holder
from kvstore.server.turns import Rest, Turns
from kvstore.stream import FrameStream

BUDGET_S = 0.0003  # of the loop's time, before it looks for what has come
PORT_MAX = 65_535
BACKLOG = 1_024  # connections that come at once, as after a restart
GREETING_S = (
    10.0  # until a connection has said what it speaks; who says nothing would keep its place for ever
)
LINGER_S = 0.5  # for the last replies of a node that stops

Peer = FrameStream
"""Whose frame it is; what is sent back to it goes to its connection."""


class Endpoint:
    """Receives frames and sends frames; knows nothing of what is in them.

    Args:
        listen: "host:port"; IPv4, "[IPv6]" or a name that resolves to one of them. Port 0 takes a free one.
        receive: is given (peer, frame) on the loop, one call per frame; returns what is left to be done of it.
        malformed: is called for every connection that carries something else than frames, or does not say in time
            what it carries; it is ended.
    """

    def __init__(
        self, listen: str, receive: Callable[[Peer, bytes], Rest | None], malformed: Callable[[], None]
    ) -> None:
        self.address = listen
        self._receive = receive
        self._malformed = malformed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._peers: dict[Peer, asyncio.TimerHandle] = {}  # and when it must have greeted
        self._none_left = asyncio.Event()
        self._unread: dict[Peer, None] = {}  # may have sent a whole frame; in the order of their turns
        self._turns: Turns[Peer] = Turns()
        self._reading = False
        self._drain_is_due = False

    async def start(self) -> None:
        """Binds; afterwards `address` is what was bound.

        Raises:
            BadConfiguration: the address is taken (and by whom), cannot be resolved or is not ours.
        """
        self._loop = asyncio.get_running_loop()
        host, port, ipv6 = await _resolve(self._loop, self.address)
        try:
            listening = _listening(host, port, ipv6=ipv6)
        except OSError as error:
            raise BadConfiguration(_why_not_bound(self.address, port, error)) from error
        self._reading = True
        self._server = await self._loop.create_server(self._connection, sock=listening, backlog=BACKLOG)
        host, port, *_ = listening.getsockname()
        self.address = f"[{host}]:{port}" if ipv6 else f"{host}:{port}"

    def stop_reading(self) -> None:
        """No frame is received any more; replies can still be sent."""
        self._reading = False
        for peer in self._peers:
            peer.pause()

    async def close(self) -> None:
        """Gives the port back, after the last replies have left or 0.5 s have passed."""
        self.stop_reading()
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self._peers:
                    self._none_left.clear()
                    await self._none_left.wait()
        for peer in list(self._peers):
            peer.abort()

    def send(self, peer: Peer, frame: bytes) -> bool:
        """Sends one frame without waiting. False: the peer is gone, or does not take its replies."""
        return peer.send(frame)

    def _connection(self) -> Peer:
        return FrameStream(self._opened, self._came, self._ended)

    def _opened(self, peer: Peer) -> None:
        self._peers[peer] = asyncio.get_running_loop().call_later(GREETING_S, self._expect_greeting, peer)
        if not self._reading:
            peer.pause()

    def _expect_greeting(self, peer: Peer) -> None:
        if not peer.greeted:
            self._refuse(peer)

    def _refuse(self, peer: Peer) -> None:
        self._malformed()
        peer.abort()

    def _came(self, peer: Peer) -> None:
        if peer in self._unread:  # it says more than is handled
            peer.pause()
        self._unread[peer] = None
        self._drain_soon()

    def _ended(self, peer: Peer) -> None:
        """What it has said is handled all the same."""
        self._peers.pop(peer).cancel()
        if not self._peers:
            self._none_left.set()

    def _drain_soon(self) -> None:
        if not self._drain_is_due and self._loop is not None:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_is_due = False
        assert self._loop is not None, "frames came before the start"
        end = self._loop.time() + BUDGET_S
        while self._reading:
            self._look()
            if not self._turns:
                return
            peer, frame = self._turns.take()
            rest = self._receive(peer, frame) if isinstance(frame, bytes) else frame()
            if rest is not None:
                self._turns.put_back(peer, rest)
            if self._loop.time() >= end:
                self._drain_soon()
                return

    def _look(self) -> None:
        """Has frames wait for their turn, one of each peer, as far as there is room."""
        while self._unread and not self._turns.full:
            peer = next(iter(self._unread))
            del self._unread[peer]
            try:
                frame = peer.take()
            except BadRequest:
                self._refuse(peer)
                continue
            if frame is None:
                peer.resume()
            else:
                self._turns.put(peer, frame)
                self._unread[peer] = None


def _listening(host: str, port: int, *, ipv6: bool) -> socket.socket:
    """A socket that listens at this address; of IPv6, [::] means all addresses of both kinds.

    Raises:
        OSError
    """
    listening = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ipv6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


async def _resolve(loop: asyncio.AbstractEventLoop, listen: str) -> tuple[str, int, bool]:
    """(numeric host, port, is IPv6): a name may have several addresses, and one is bound."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise BadConfiguration(f"{listen!r} is no listen address; it looks like 127.0.0.1:7400 or [::1]:7400")
    try:
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a label that is empty or too long is no name at all
        raise BadConfiguration(f"the host of {listen!r} cannot be resolved: {error}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    return str(address[0]), int(port), family == socket.AF_INET6


def _why_not_bound(listen: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {listen} is taken by {port_holder(port)}: stop that, or listen elsewhere"
    return f"cannot listen on {listen}: {error.strerror}; is it an address of this machine?"
