"""The control socket: a ZMQ ROUTER on an asyncio loop.

ZMQ tells through one descriptor that *something* changed, once per change (edge-triggered), and sending
may swallow that news. So a drain ends only with "nothing there", or with a promise to go on: after a
bounded share of the loop's time, and after every send from outside a drain.

The ROUTER takes one frame from each peer in turn, and a peer's queue is bounded (a full one stops its
TCP connection), so a peer that floods the socket waits behind itself. What has been received takes turns, see
`turns`. What is not bounded here, because ZMQ has no bound for it, is the number of parts of one message: another
reason to keep the port fenced.
"""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable

import zmq

from kvstore.core import BadConfiguration, limits
from kvstore.server.port import port_holder
from kvstore.server.turns import Rest, Turns

log = logging.getLogger(__name__)

BUDGET_S = 0.001  # of the loop's time per wake-up; timers and other sockets get their turn
FRAMES_QUEUED_PER_PEER = 64  # of requests; then the peer's connection is not read for a while
END_S = 2.0
LINGER_MS = 500  # for the last replies of a node that stops
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 20_000  # then a connection whose other end has vanished is given up


class Endpoint:
    """Receives frames and sends frames; knows nothing of what is in them.

    Args:
        listen: "host:port"; IPv4, "[IPv6]" or a name that resolves to one of them. Port 0 takes a free one.
        receive: is given (peer, frame) on the loop, one call per frame; returns what is left to be done of it.
        malformed: is called for every message that is not exactly one frame.
    """

    def __init__(
        self, listen: str, receive: Callable[[bytes, bytes], Rest | None], malformed: Callable[[], None]
    ) -> None:
        self.address = listen
        self._receive = receive
        self._malformed = malformed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._reading = False
        self._draining = False
        self._turns = Turns()

    async def start(self) -> None:
        """Binds; afterwards `address` is what was bound.

        Raises:
            BadConfiguration: the address is taken (and by whom), cannot be resolved or is not ours.
        """
        self._loop = asyncio.get_running_loop()
        host, port, ipv6 = await _resolve(self._loop, self.address)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, ipv6)
        try:
            self._socket.bind(f"tcp://[{host}]:{port}" if ipv6 else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise BadConfiguration(_why_not_bound(self.address, port, error)) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._reading = True
        self._loop.add_reader(self._socket, self._drain)
        self._loop.call_soon(self._drain)

    def stop_reading(self) -> None:
        """No frame is received any more; replies can still be sent."""
        if self._reading and self._loop is not None and self._socket is not None:
            self._reading = False
            self._loop.remove_reader(self._socket)

    async def close(self) -> None:
        """Gives the port back, after the last replies have left or 0.5 s have passed."""
        self.stop_reading()
        if self._socket is not None:
            self._socket.close(linger=LINGER_MS)
            self._socket = None
        context, self._context = self._context, None  # ending one twice at a time aborts the process
        if context is not None and self._loop is not None:
            # `term` has been seen to hang for ever (libzmq 4.3.5, a connection that broke while its socket was
            # closing), so it runs in a thread that nobody must wait for.
            ending = threading.Thread(target=context.term, name="zmq-term", daemon=True)
            ending.start()
            await self._loop.run_in_executor(None, ending.join, END_S)
            if ending.is_alive():
                log.warning("a client's connection did not end within %g s; it is left to itself", END_S)

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Sends one frame without waiting. False: the peer is gone, or does not take its replies."""
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart((peer, frame), flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                raise
            return False
        finally:
            if not self._draining and self._reading and self._loop is not None:
                self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        if not self._reading or self._socket is None or self._loop is None:
            return
        end = self._loop.time() + BUDGET_S
        self._draining = True
        try:
            while self._loop.time() < end:
                self._look()
                if not self._turns:
                    return
                peer, frame = self._turns.take()
                rest = self._receive(peer, frame) if isinstance(frame, bytes) else frame()
                if rest is not None:
                    self._turns.put_back(peer, rest)
        finally:
            self._draining = False
        self._loop.call_soon(self._drain)

    def _look(self) -> None:
        """Receives what has come, as far as there is room. Nothing there: the next change will be told."""
        assert self._socket is not None, "looked at before the start"
        try:
            while not self._turns.full:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
                if len(parts) == 2:
                    self._turns.put(parts[0], parts[1])
                else:
                    self._malformed()
        except zmq.Again:
            return


def _configure(router: "zmq.Socket[bytes]", ipv6: bool) -> None:
    router.setsockopt(zmq.IPV6, int(ipv6))
    router.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES_MAX)  # a larger frame ends its connection
    router.setsockopt(zmq.RCVHWM, FRAMES_QUEUED_PER_PEER)
    router.setsockopt(zmq.SNDHWM, limits.REPLIES_QUEUED_MAX)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply that cannot be delivered is counted
    router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


async def _resolve(loop: asyncio.AbstractEventLoop, listen: str) -> tuple[str, int, bool]:
    """(numeric host, port, is IPv6): ZMQ binds to numbers only."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise BadConfiguration(f"{listen!r} is no listen address; it looks like 127.0.0.1:7400 or [::1]:7400")
    try:
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadConfiguration(f"the host of {listen!r} cannot be resolved: {error}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    return str(address[0]), int(port), family == socket.AF_INET6


def _why_not_bound(listen: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {listen} is taken by {port_holder(port)}: stop that, or listen elsewhere"
    return f"cannot listen on {listen}: {error}; is it an address of this machine?"
