"""Frames to messages and back. Anything that is not a well-formed, bounded message is a `BadRequest`."""

from collections.abc import Sequence

import msgspec

from kvstore.core import BadRequest, limits
from kvstore.wire.messages import (
    Abort,
    Acquire,
    Commit,
    Drop,
    Pages,
    Prefetch,
    Release,
    Reply,
    Report,
    Request,
    Reserve,
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """A request whose sizes are within limits; versions, tokens and namespaces are the server's business.

    Raises:
        BadRequest: garbage, a truncated or oversized frame, a batch or id of the wrong size.
    """
    if len(frame) > limits.FRAME_BYTES_MAX:
        raise BadRequest(f"a frame of {len(frame)} bytes; at most {limits.FRAME_BYTES_MAX} are read")
    try:
        request = _request_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"not a request of this protocol: {error}") from error
    _check(request)
    return request


def decode_reply(frame: bytes | memoryview) -> Reply:
    """A reply.

    Raises:
        BadRequest: the peer does not speak this protocol.
    """
    try:
        return _reply_decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise BadRequest(f"not a reply of this protocol: {error}") from error


def _check(request: Request) -> None:
    if len(request.client) != limits.CLIENT_ID_BYTES:
        raise BadRequest(f"a client id has {limits.CLIENT_ID_BYTES} bytes")
    match request.body:
        case Reserve(items=items):
            _bounded(items)
            _sized([item.key for item in items], limits.KEY_BYTES, "a key")
            _sized([item.parent for item in items], limits.KEY_BYTES, "a parent key")
        case Commit(items=items):
            _bounded(items)
            _sized([item.key for item in items], limits.KEY_BYTES, "a key")
            _sized([item.generation for item in items], limits.GENERATION_BYTES, "a generation")
        case Abort(items=items):
            _bounded(items)
            _sized([key for key, _ in items], limits.KEY_BYTES, "a key")
            _sized([generation for _, generation in items], limits.GENERATION_BYTES, "a generation")
        case Acquire(keys=keys, lease=lease) | Pages(keys=keys, lease=lease) | Release(keys=keys, lease=lease):
            _bounded(keys)
            _sized(keys, limits.KEY_BYTES, "a key")
            _sized([lease], limits.LEASE_ID_BYTES, "a lease id")
        case Prefetch(keys=keys) | Drop(keys=keys):
            _bounded(keys)
            _sized(keys, limits.KEY_BYTES, "a key")
        case Report(items=reports):
            if len(reports) > limits.REPORTS_PER_CALL_MAX:
                raise BadRequest(f"{len(reports)} reports in a call; at most {limits.REPORTS_PER_CALL_MAX}")
        case _:
            pass


def _bounded(batch: tuple[object, ...]) -> None:
    if len(batch) > limits.BATCH_KEYS_MAX:
        raise BadRequest(f"a batch of {len(batch)} keys; at most {limits.BATCH_KEYS_MAX}")


def _sized(values: Sequence[bytes], size_bytes: int, what: str) -> None:
    for value in values:
        if len(value) != size_bytes:
            raise BadRequest(f"{what} has {size_bytes} bytes, not {len(value)}")
