"""One end of a connection, on an asyncio loop: written to and read from by the loop's own thread.

Every thread that bytes go through on their way has to wait for a core, and on a busy machine that is most of what a
question takes. So there is none but the two that ask and answer.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from kvstore.core import limits
from kvstore.stream.frames import PREAMBLE, FrameReader, framed

_PROBE_S = 5  # between two looks at a connection on which nothing comes
_PROBES = 3
_VANISHED_S = _PROBE_S * (_PROBES + 1)  # then a connection whose other end has vanished is given up


class FrameStream(asyncio.Protocol):
    """Frames in, frames out.

    Args:
        on_open: is told, once, that there is a connection.
        on_bytes: is told that bytes came; `take` then says whether a frame has.
        on_end: is told, once, that the connection is no more.
    """

    def __init__(
        self,
        on_open: Callable[["FrameStream"], None],
        on_bytes: Callable[["FrameStream"], None],
        on_end: Callable[["FrameStream"], None],
    ) -> None:
        self._on_open = on_open
        self._on_bytes = on_bytes
        self._on_end = on_end
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    @property
    def greeted(self) -> bool:
        """Whether the other side speaks this protocol."""
        return self._reader.greeted

    @property
    def unsent_bytes(self) -> int:
        """Of frames that the other side has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def take(self) -> bytes | None:
        """The next frame, if it has come.

        Raises:
            BadRequest: what came is none; the connection is of no more use.
        """
        return self._reader.take()

    def send(self, frame: bytes) -> bool:
        """Sends a frame without waiting. False: the connection has ended, or too much waits to be taken."""
        if self._transport is None or self._transport.is_closing():
            return False
        if self.unsent_bytes > limits.UNSENT_BYTES_MAX:
            return False
        self._transport.write(framed(frame))
        return True

    def pause(self) -> None:
        """Receives no more for now: what comes stays with the kernel, and then with who sends it."""
        if self._transport:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Receives again."""
        if self._transport:
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection when what was sent has been taken."""
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport:
            self._transport.abort()

    # --- called by the loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport), "frames need a stream"
        self._transport = transport
        _configure(transport.get_extra_info("socket"))
        transport.write(PREAMBLE)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._reader.feed(data)
        self._on_bytes(self)

    def connection_lost(self, _: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None  # to abort one that has ended would end it a second time
        self._on_end(self)


async def connect(address: str, stream: FrameStream) -> None:
    """Connects a stream to "host:port"; IPv6 stands in brackets.

    Raises:
        OSError: nobody listens there, or the name cannot be resolved.
    """
    host, _, port = address.rpartition(":")
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: stream, host.strip("[]"), int(port)
    )
    if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
        # Who tries a port of this host for hours, and nobody listens there, is one day given that very port.
        stream.abort()
        raise ConnectionRefusedError(f"nobody listens at {address}")


def _configure(connection: socket.socket) -> None:
    """Frames leave at once: one that waits until the last is acknowledged waits for 40 ms. A host that lost its power
    says nothing: the kernel asks it, and gives up what it does not acknowledge."""
    with contextlib.suppress(OSError):  # it has ended already, which the loop tells
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so now and then
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1_000 * _VANISHED_S)
