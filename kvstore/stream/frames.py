"""How a stream of bytes is cut into frames. Pure: bytes in, frames out.

Either side says the preamble first, so that who has reached something else notices with the first bytes. Then frames
follow: four bytes of length, little-endian, and so many bytes.
"""

import struct

from kvstore.core import BadRequest, limits

PREAMBLE = b"kvstore\x01"
"""The last byte counts versions of what is said here; what frames say has a version of its own."""

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


def framed(frame: bytes) -> bytes:
    """The frame as it stands in the stream."""
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """Frames of a stream whose bytes come in any pieces."""

    def __init__(self) -> None:
        self.greeted = False  # the preamble has come
        self._frame_bytes_max = limits.FRAME_BYTES_MAX
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """These bytes came."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The next frame, if all of it has come.

        Raises:
            BadRequest: the other side speaks something else, or its frame is too long; nothing more can be read.
        """
        if not self.greeted and not self._take_preamble():
            return None
        buffer = self._buffer
        if len(buffer) < LENGTH_BYTES:
            return None
        (size_bytes,) = _LENGTH.unpack_from(buffer)
        if size_bytes > self._frame_bytes_max:
            raise BadRequest(f"a frame has {size_bytes} bytes, {self._frame_bytes_max} are allowed")
        end = LENGTH_BYTES + size_bytes
        if len(buffer) < end:
            return None
        frame = bytes(memoryview(buffer)[LENGTH_BYTES:end])
        del buffer[:end]
        return frame

    def _take_preamble(self) -> bool:
        came = bytes(self._buffer[: len(PREAMBLE)])
        if not PREAMBLE.startswith(came):
            raise BadRequest(
                "the other side does not speak this protocol: is it another service, or release?"
            )
        self.greeted = came == PREAMBLE
        if self.greeted:
            del self._buffer[: len(PREAMBLE)]
        return self.greeted
