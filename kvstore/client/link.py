"""One connection to one node, on an asyncio loop: many requests at a time.

A request is sent only over a live connection (otherwise it waits here, and goes away with its caller), so
a node that comes back is not greeted by requests nobody waits for any more. When a connection is lost or
refused, all requests fail at once: the replies of those sent have nowhere to go, and those not sent need
not wait for their deadlines to learn that nobody listens. The link goes on connecting by itself.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import count

from kvstore.client.address import is_address
from kvstore.core import BadConfiguration, BadRequest, PeerLost, limits
from kvstore.stream import FrameStream, connect
from kvstore.wire import VERSION, ClientId, Reply, Request, RequestBody, decode_reply, encode

RECONNECT_S = 0.05
RECONNECT_S_MAX = 1.0
CONNECT_S = (
    5.0  # until a node has said what it speaks; one that is stopped accepts connections and says nothing
)
LATE_REPLIES_MAX = 1_024

OnLate = Callable[[Reply], None]


class Link:
    """Sends requests to `control` ("host:port") and matches the replies. Made and used on one running loop.

    Raises:
        BadConfiguration: `control` is no address.
    """

    def __init__(self, control: str, client: ClientId, token: bytes) -> None:
        if not is_address(control):
            raise BadConfiguration(
                f"{control!r} is no address of a node; it looks like 10.0.0.1:7400 or [fd00::1]:7400"
            )
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
        self._closed = False
        self._stream: FrameStream | None = None  # while there is a connection to a node
        self._trouble = f"the connection to node {control} is closed"
        self._connecting = self._loop.create_task(self._stay_connected(), name=f"link to {control}")

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
            return await future
        except asyncio.CancelledError:
            if on_late is not None and request_id not in self._unsent:
                self._expect_late(request_id, future, on_late)
            raise
        finally:
            del self._waiting[request_id]
            self._unsent.discard(request_id)
            self._flush()  # there is room for another one

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
        return self._send(self._frame(next(self._ids), body))

    def close(self) -> None:
        """Ends the connection; requests under way fail."""
        self._closed = True
        self._connecting.cancel()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._fail_all()

    def _frame(self, request_id: int, body: RequestBody) -> bytes:
        return encode(Request(VERSION, self._client, request_id, body, self._token))

    def _send(self, frame: bytes) -> bool:
        return self._stream is not None and self._stream.send(frame)

    def _flush(self) -> None:
        """Sends what waits, as far as requests may be under way."""
        while self._outbox and len(self._waiting) - len(self._unsent) < limits.REQUESTS_IN_FLIGHT_MAX:
            request_id, frame = self._outbox[0]
            if request_id in self._unsent:
                if not self._send(frame):
                    return
                self._unsent.discard(request_id)
            self._outbox.popleft()

    # --- the connection -------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        pause_s = RECONNECT_S
        while True:
            lost = asyncio.Event()
            stream = FrameStream(_opened, self._came, partial(self._ended, lost))
            self._trouble = f"no connection to node {self.control}: is it running?"
            try:
                async with asyncio.timeout(CONNECT_S) as self._patience:
                    await connect(self.control, stream)
                    await lost.wait()
            except (OSError, TimeoutError, UnicodeError) as error:
                self._trouble += f" ({error})" if str(error) else ""
            finally:
                stream.close()
            self._fail_all()
            await asyncio.sleep(pause_s)
            pause_s = RECONNECT_S if stream.greeted else min(2 * pause_s, RECONNECT_S_MAX)

    def _came(self, stream: FrameStream) -> None:
        try:
            while (frame := stream.take()) is not None:
                self._receive(frame)
        except BadRequest as error:
            self._trouble = f"{self.control}: {error}"
            stream.abort()
            return
        if stream.greeted and self._stream is None and not self._closed:
            self._patience.reschedule(None)
            self._stream = stream
            self._flush()

    def _ended(self, lost: asyncio.Event, stream: FrameStream) -> None:
        if stream is self._stream:
            self._stream = None
        lost.set()

    def _receive(self, frame: bytes) -> None:
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

    def _fail_all(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(self._trouble))


def _opened(_: FrameStream) -> None:
    """It is used when the node has said what it speaks."""
