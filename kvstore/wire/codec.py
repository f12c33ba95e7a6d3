"""Frames to messages and back. Anything that is not a well-formed, bounded message is a `BadRequest`.

The bounds stand in the types of `messages`, so one pass in C both decodes and checks.
"""

import msgspec

from kvstore.core import BadRequest, limits
from kvstore.wire.messages import Acquired, Envelope, Prepared, Reply, Request, Resident

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_reply_decoder = msgspec.msgpack.Decoder(Reply)

# What msgspec raises on bytes that others chose.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


LARGE_ANSWERS = (
    16  # from here on a reply may have so many tables that growing a buffer for it costs more than it
)


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def prepare(answer: Resident) -> Prepared:
    """The answer, encoded. Of a hundred thousand objects none is in a processor's cache: to follow what their answers
    are made of takes several times as long as to copy bytes."""
    return Prepared(_encoder.encode(answer))


class ReplyEncoder:
    """Frames of replies, over one buffer: a fresh one, grown to a megabyte of tables, costs more than its contents.

    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def encode(self, reply: Reply) -> bytes:
        """One frame."""
        if not isinstance(reply.body, Acquired) or len(reply.body.answers) < LARGE_ANSWERS:
            return _encoder.encode(reply)
        _encoder.encode_into(reply, self._buffer)
        return bytes(self._buffer)


def decode_request(frame: bytes | memoryview) -> Request:
    """A request whose sizes are within limits; versions, tokens and namespaces are the server's business.

    Raises:
        BadRequest: garbage, a truncated or oversized frame, a batch or id of the wrong size.
    """
    if len(frame) > limits.FRAME_BYTES_MAX:
        raise BadRequest(f"a frame of {len(frame)} bytes; at most {limits.FRAME_BYTES_MAX} are read")
    try:
        return _request_decoder.decode(frame)
    except _UNREADABLE as error:
        raise BadRequest(f"not a request of this protocol: {error}") from error


def decode_envelope(frame: bytes | memoryview) -> Envelope:
    """The part of a request that every version shares, for the answer to one that could not be read.

    Raises:
        BadRequest: not even that can be read.
    """
    try:
        return _envelope_decoder.decode(frame)
    except _UNREADABLE as error:
        raise BadRequest(f"not a request of any version: {error}") from error


def decode_reply(frame: bytes | memoryview) -> Reply:
    """A reply.

    Raises:
        BadRequest: the peer does not speak this protocol.
    """
    try:
        return _reply_decoder.decode(frame)
    except _UNREADABLE as error:
        raise BadRequest(f"not a reply of this protocol: {error}") from error
