"""One connection to one node: a ZMQ DEALER on an asyncio loop, many requests at a time.

A request is sent only over a live connection (otherwise it waits here, and goes away with its caller), so
a node that comes back is not greeted by requests nobody waits for any more. When a connection is lost or
refused, all requests fail at once: the replies of those sent have nowhere to go, and those not sent need
not wait for their deadlines to learn that nobody listens. ZMQ goes on connecting by itself.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count

import zmq

from kvstore.core import BadConfiguration, BadRequest, PeerLost, limits
from kvstore.wire import VERSION, ClientId, Reply, Request, RequestBody, decode_reply, encode

RECONNECT_MS = 50
RECONNECT_MS_MAX = 1_000
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 20_000
LATE_REPLIES_MAX = 1_024
FRAMES_PER_WAKE_UP = 64
LINGER_MS = 100  # for the last releases
NO_CONNECTION = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED

OnLate = Callable[[Reply], None]


class Link:
    """Sends requests to `control` ("host:port") and matches the replies. Made and used on one running loop.

    Raises:
        BadConfiguration: `control` is no address.
    """

    def __init__(
        self, control: str, client: ClientId, token: bytes, context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        self.control = control
        self.garbage_frames = 0
        self._client = client
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._unsent: set[int] = set()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._late: OrderedDict[int, OnLate] = OrderedDict()
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket, ipv6=control.startswith("["))
        self._monitor = self._socket.get_monitor_socket(NO_CONNECTION)
        self._connect()
        self._closed = False
        self._loop.add_reader(self._socket, self._drain)
        self._loop.add_reader(self._monitor, self._drain_monitor)
        self._loop.call_soon(self._drain_monitor)  # a queue tells of news only once it was found empty

    def _connect(self) -> None:
        try:
            self._socket.connect(f"tcp://{self.control}")
        except zmq.ZMQError as error:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            raise BadConfiguration(
                f"{self.control!r} is no address of a node; it looks like 10.0.0.1:7400 or [fd00::1]:7400"
            ) from error

    async def ask(self, body: RequestBody, on_late: OnLate | None = None) -> Reply:
        """Sends a request and waits for its reply; the caller brings the deadline.

        `on_late` gets the reply that comes after the caller has gone (cancelled or out of time).

        Raises:
            PeerLost: the connection broke before the reply came.
        """
        if self._closed:
            raise PeerLost(f"the connection to node {self.control} is closed")
        request_id = next(self._ids)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[request_id] = future
        self._unsent.add(request_id)
        self._outbox.append((request_id, self._frame(request_id, body)))
        try:
            self._flush()
            self._loop.call_soon(self._drain)
            return await future
        except asyncio.CancelledError:
            if on_late is not None and request_id not in self._unsent:
                self._expect_late(request_id, future, on_late)
            raise
        finally:
            del self._waiting[request_id]
            self._unsent.discard(request_id)
            if self._outbox and not self._closed:
                self._loop.call_soon(self._drain)  # there is room for another one

    def _expect_late(self, request_id: int, future: "asyncio.Future[Reply]", on_late: OnLate) -> None:
        if future.done() and not future.cancelled() and future.exception() is None:
            # It came in the same turn of the loop as the cancellation: told when the caller has really gone.
            self._loop.call_soon(on_late, future.result())
            return
        self._late[request_id] = on_late
        if len(self._late) > LATE_REPLIES_MAX:
            self._late.popitem(last=False)

    def post(self, body: RequestBody) -> bool:
        """Sends a request whose reply nobody waits for. False: there is no connection, it was not sent."""
        if self._closed or not self._send(self._frame(next(self._ids), body)):
            return False
        self._loop.call_soon(self._drain)
        return True

    def close(self) -> None:
        """Ends the connection; requests under way fail."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_reader(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        self._fail_all()

    def _frame(self, request_id: int, body: RequestBody) -> bytes:
        return encode(Request(VERSION, self._client, request_id, body, self._token))

    def _send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _has_to_send(self) -> bool:
        in_flight = len(self._waiting) - len(self._unsent)
        return bool(self._outbox) and in_flight < limits.REQUESTS_IN_FLIGHT_MAX

    def _flush(self) -> None:
        while self._has_to_send():
            request_id, frame = self._outbox[0]
            if request_id in self._unsent:
                if not self._send(frame):
                    return
                self._unsent.discard(request_id)
            self._outbox.popleft()

    def _drain(self) -> None:
        """Receives and sends until neither is possible. ZMQ tells of news once, and any call may swallow it:
        so its state is looked at before every step, and here once more after each send from outside."""
        for _ in range(FRAMES_PER_WAKE_UP):
            if self._closed:
                return
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if events & zmq.POLLIN:
                self._receive(self._socket.recv(zmq.DONTWAIT, copy=False).buffer)
            elif events & zmq.POLLOUT and self._has_to_send():
                self._flush()
            else:
                return
        self._loop.call_soon(self._drain)

    def _receive(self, frame: memoryview) -> None:
        try:
            reply = decode_reply(frame)
        except BadRequest:
            self.garbage_frames += 1
            return
        future = self._waiting.get(reply.request_id)
        if future is not None and not future.done():
            future.set_result(reply)
        elif (on_late := self._late.pop(reply.request_id, None)) is not None:
            on_late(reply)

    def _drain_monitor(self) -> None:
        try:
            while not self._closed:
                self._monitor.recv_multipart(zmq.DONTWAIT)
                self._drain()  # replies that came before the end
                self._fail_all()
        except zmq.Again:
            return

    def _fail_all(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"no connection to node {self.control}: is it running?"))


def _configure(dealer: "zmq.Socket[bytes]", *, ipv6: bool) -> None:
    dealer.setsockopt(zmq.IPV6, int(ipv6))  # with it, "localhost" would mean ::1 only
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
    dealer.setsockopt(zmq.SNDHWM, limits.REQUESTS_IN_FLIGHT_MAX)
    dealer.setsockopt(zmq.RCVHWM, limits.REPLIES_QUEUED_MAX)
    dealer.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES_MAX)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
