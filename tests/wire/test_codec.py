"""Frames: what is encoded comes back, what is not a bounded message never does."""

import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.core import BadRequest, Key, MissReason, Namespace, limits
from kvstore.wire import (
    VERSIONS_SPOKEN,
    Abort,
    Acquire,
    Acquired,
    BootId,
    ClientId,
    Commit,
    CommitItem,
    Drop,
    Envelope,
    Generation,
    Hello,
    LeaseId,
    Miss,
    Pages,
    Prefetch,
    Release,
    Renew,
    Reply,
    Report,
    ReportItem,
    Request,
    RequestBody,
    Reserve,
    ReserveItem,
    Resident,
    Suspect,
    decode_envelope,
    decode_reply,
    decode_request,
    encode,
)
from tests.wire.values import replies, requests

KEY, NAMESPACE = Key(b"k" * 32), Namespace(b"n" * 32)
LEASE, GENERATION, CLIENT = LeaseId(b"l" * 16), Generation(b"g" * 8), ClientId(b"c" * 16)


def request(body: RequestBody, client: ClientId = CLIENT, token: bytes = b"") -> bytes:
    return encode(Request(1, client, 7, body, token))


@given(requests)
def test_a_request_comes_back_as_it_was(message) -> None:
    frame = encode(message)
    assert decode_request(frame) == message
    assert decode_request(memoryview(frame)) == message
    assert decode_envelope(frame) == Envelope(message.version, message.client, message.request_id)


@given(replies)
def test_a_reply_comes_back_as_it_was(message) -> None:
    assert decode_reply(encode(message)) == message


@given(requests, st.data())
def test_a_truncated_request_is_refused_wherever_it_is_cut(message, data) -> None:
    frame = encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for decode in (decode_request, decode_envelope):
        with pytest.raises(BadRequest):
            decode(frame[:cut])


@given(replies, st.data())
def test_a_truncated_reply_is_refused_wherever_it_is_cut(message, data) -> None:
    frame = encode(message)
    with pytest.raises(BadRequest):
        decode_reply(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(requests, st.data())
def test_a_damaged_request_is_refused_or_still_within_bounds(message, data) -> None:
    """Whatever bytes come, the decoder raises BadRequest or gives a message that would encode again."""
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_request(bytes(frame))
    except BadRequest:
        return
    assert decode_request(encode(decoded)) == decoded


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 10_000)  # arrays in arrays
@example(b"\xdd\xff\xff\xff\xff")  # an array that says it has four billion entries
def test_garbage_is_refused_and_nothing_else(frame) -> None:
    for decode in (decode_request, decode_envelope, decode_reply):
        with pytest.raises(BadRequest):
            decode(frame)


@pytest.mark.parametrize(
    ("good", "bad"),
    [(b"\xa1r", b"\xa1\xff"), (b"\xc4\x00", b"\x91" * 20_000 + b"\xc0")],
    ids=["text that is no UTF-8", "arrays in arrays"],
)
def test_garbage_inside_a_request_is_refused(good, bad) -> None:
    frame = request(Report((ReportItem("r", 1, 1, 1),)))
    assert frame.count(good) == 1
    with pytest.raises(BadRequest):
        decode_request(frame.replace(good, bad))


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(BadRequest):
        decode_request(request(Hello()) + b"\x00")


def test_an_oversized_frame_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(BadRequest, match=str(limits.FRAME_BYTES_MAX)):
        decode_request(bytes(limits.FRAME_BYTES_MAX + 1))


MANY = (KEY,) * (limits.BATCH_KEYS_MAX + 1)
OUT_OF_BOUNDS: list[RequestBody] = [
    Hello(b"n" * 33),
    Hello(NAMESPACE, bytes(limits.MANIFEST_BYTES_MAX + 1)),
    Reserve(Namespace(b"n" * 31), (), 1.0),
    Reserve(NAMESPACE, (ReserveItem(KEY, KEY, 0, 1),) * len(MANY), 1.0),
    Reserve(NAMESPACE, (ReserveItem(Key(b"k" * 33), KEY, 0, 1),), 1.0),
    Reserve(NAMESPACE, (ReserveItem(KEY, Key(b"k" * 31), 0, 1),), 1.0),
    Reserve(NAMESPACE, (ReserveItem(KEY, KEY, -1, 1),), 1.0),
    Reserve(NAMESPACE, (ReserveItem(KEY, KEY, 0, 0),), 1.0),
    Reserve(NAMESPACE, (), -1.0),
    Reserve(NAMESPACE, (), math.nan),
    Reserve(NAMESPACE, (), math.inf),
    Commit(NAMESPACE, (CommitItem(KEY, GENERATION, b""),) * len(MANY)),
    Commit(NAMESPACE, (CommitItem(KEY, Generation(b"g" * 7), b""),)),
    Commit(
        NAMESPACE,
        (CommitItem(KEY, GENERATION, bytes(limits.RUNS_PER_OBJECT_MAX * limits.CHECKSUM_BYTES + 1)),),
    ),
    Abort(NAMESPACE, ((KEY, GENERATION),) * len(MANY), True),
    Abort(NAMESPACE, ((Key(b"k"), GENERATION),), True),
    Abort(NAMESPACE, ((KEY, Generation(b"")),), True),
    Acquire(NAMESPACE, MANY, LEASE, 1.0),
    Acquire(NAMESPACE, (Key(b""),), LEASE, 1.0),
    Acquire(NAMESPACE, (KEY,), LeaseId(b"l" * 15), 1.0),
    Acquire(NAMESPACE, (KEY,), LEASE, math.nan),
    Acquire(NAMESPACE, (KEY,), LEASE, 1.0, math.inf),
    Pages(LeaseId(b""), ()),
    Pages(LEASE, MANY),
    Pages(LEASE, (), -0.1),
    Renew(LeaseId(b"l" * 17), 1.0),
    Renew(LEASE, math.nan),
    Release(LEASE, MANY),
    Release(LeaseId(b""), ()),
    Prefetch(NAMESPACE, MANY),
    Suspect(NAMESPACE, Key(b"k"), GENERATION, LEASE),
    Suspect(NAMESPACE, KEY, Generation(b"g"), LEASE),
    Suspect(NAMESPACE, KEY, GENERATION, LeaseId(b"l")),
    Report((ReportItem("r", 1, 1, 1),) * (limits.REPORTS_PER_CALL_MAX + 1)),
    Report((ReportItem("r" * (limits.REQUEST_NAME_MAX + 1), 1, 1, 1),)),
    Report((ReportItem("r", -1, 0, 0),)),
    Drop(NAMESPACE, MANY),
]


@pytest.mark.parametrize(
    "body",
    OUT_OF_BOUNDS,
    ids=[f"{type(body).__name__}-{number}" for number, body in enumerate(OUT_OF_BOUNDS)],
)
def test_whatever_is_out_of_bounds_is_refused(body) -> None:
    with pytest.raises(BadRequest, match="not a request of this protocol"):
        decode_request(request(body))


def test_every_call_has_a_bound_that_is_tested() -> None:
    """A new call without one fails here."""
    assert {type(body) for body in OUT_OF_BOUNDS} == set(RequestBody.__args__)


@pytest.mark.parametrize(
    ("client", "token"), [(ClientId(b"c" * 15), b""), (CLIENT, bytes(limits.TOKEN_BYTES_MAX + 1))]
)
def test_the_envelope_is_bounded_too(client, token) -> None:
    with pytest.raises(BadRequest):
        decode_request(request(Hello(), client, token))


def test_a_full_batch_is_within_bounds() -> None:
    table = bytes(256 * limits.CHECKSUM_BYTES)
    full = (CommitItem(KEY, GENERATION, table),) * limits.BATCH_KEYS_MAX
    assert len(decode_request(request(Commit(NAMESPACE, full))).body.items) == limits.BATCH_KEYS_MAX  # type: ignore[union-attr]
    resident = Resident(GENERATION, ((1, 32),), 1 << 25, table)
    reply = encode(Reply(1, BootId(b"b" * 8), 1, Acquired((resident,) * limits.BATCH_KEYS_MAX)))
    assert len(reply) < limits.FRAME_BYTES_MAX


# Frames of version 1, as they are on the wire: they must stay readable for as long as it is spoken.

GOLDEN_REQUESTS: dict[str, RequestBody] = {
    "9501c4106363636363636363636363636363636307 93a548656c6c6fc400c400 c400": Hello(),
    "9501c4106363636363636363636363636363636307"
    "94a752657365727665c4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e"
    "9195c4206b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b"
    "c4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e00cd0800c2"
    "cb403e000000000000c400": Reserve(NAMESPACE, (ReserveItem(KEY, Key(NAMESPACE), 0, 2048),), 30.0),
    "9501c4106363636363636363636363636363636307"
    "98a741637175697265c4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e"
    "91c4206b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b"
    "c4106c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6ccb4024000000000000cb0000000000000000c3c2"
    "c400": Acquire(NAMESPACE, (KEY,), LEASE, 10.0),
}
BEFORE_SEALS = (  # the last of them, by a client that does not know `sealed`
    "9501c4106363636363636363636363636363636307"
    "97a741637175697265c4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e"
    "91c4206b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b"
    "c4106c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6ccb4024000000000000cb0000000000000000c3"
    "c400"
)
GOLDEN_REPLY = (
    "9401c4086262626262626262 07"
    "92a84163717569726564"
    "9295a85265736964656e74c40867676767676767679192 0304 cd0800 c4081122334455667788"
    "92a44d697373a765766963746564"
)


@pytest.mark.parametrize(("frame", "body"), GOLDEN_REQUESTS.items(), ids=["hello", "reserve", "acquire"])
def test_golden_requests(frame, body) -> None:
    raw = bytes.fromhex(frame)
    assert decode_request(raw) == Request(1, CLIENT, 7, body, b"")
    assert request(body).hex() == raw.hex()


def test_a_client_that_does_not_know_seals_gets_tables() -> None:
    assert decode_request(bytes.fromhex(BEFORE_SEALS)).body == Acquire(
        NAMESPACE, (KEY,), LEASE, 10.0, sealed=False
    )


def test_a_golden_reply() -> None:
    raw = bytes.fromhex(GOLDEN_REPLY)
    resident = Resident(GENERATION, ((3, 4),), 2048, bytes.fromhex("1122334455667788"))
    reply = Reply(1, BootId(b"b" * 8), 7, Acquired((resident, Miss(MissReason.EVICTED))))
    assert decode_reply(raw) == reply
    assert encode(reply).hex() == raw.hex()


def test_fields_that_a_newer_peer_appends_are_skipped_and_missing_ones_have_defaults() -> None:
    """The versioning rule: fields are only appended, each with a default."""
    appended = msgspec.msgpack.encode([1, CLIENT, 7, ["Renew", LEASE, 5.0, "new"], b"", "new"])
    assert decode_request(appended).body == Renew(LEASE, 5.0)
    without_token = msgspec.msgpack.encode([1, CLIENT, 7, ["Release", LEASE]])
    assert decode_request(without_token) == Request(1, CLIENT, 7, Release(LEASE), b"")


def test_a_request_of_an_unknown_version_can_be_answered() -> None:
    future = msgspec.msgpack.encode([99, b"?", 12, {"a": "different", "shape": 1}, "more", "fields"])
    with pytest.raises(BadRequest):
        decode_request(future)
    envelope = decode_envelope(future)
    assert envelope.request_id == 12
    assert envelope.version not in VERSIONS_SPOKEN
