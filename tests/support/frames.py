"""A connection that says what it likes, for what no well-behaved client sends."""

import select
import socket

from kvstore.stream import PREAMBLE, FrameReader, framed


class RawConnection:
    """Frames, or any bytes, over a blocking socket; replies are taken when asked for."""

    def __init__(self, address: str, preamble: bytes = PREAMBLE) -> None:
        host, _, port = address.rpartition(":")
        self.ended = False
        self._reader = FrameReader()
        self._socket = socket.create_connection((host.strip("[]"), int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send_bytes(preamble)

    def send(self, frame: bytes) -> None:
        self.send_bytes(framed(frame))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """The next frame, if one is there or comes in time; None also when the other side has ended (`ended`)."""
        while (frame := self._reader.take()) is None:
            if self.ended or not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            self.ended = not data
            self._reader.feed(data)
        return frame

    def close(self) -> None:
        self._socket.close()
