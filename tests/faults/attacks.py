"""Frames that no honest client sends, by a process of its own."""

import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import msgspec

from kvstore.core import Key, limits
from kvstore.stream import LENGTH_BYTES, framed
from kvstore.wire import (
    VERSION,
    Abort,
    Acquire,
    ClientId,
    Commit,
    CommitItem,
    Drop,
    Generation,
    Hello,
    LeaseId,
    Pages,
    Prefetch,
    Release,
    Renew,
    Request,
    RequestBody,
    Reserve,
    ReserveItem,
    Suspect,
    decode_reply,
    encode,
)
from tests.faults.clients import LIVES_S, MANIFEST
from tests.support.frames import RawConnection

CONNECTIONS = 4
HUGE_EVERY = 2_000
NAMESPACE = MANIFEST.namespace
PAUSE_EVERY = 64
LAST = 1 << 40  # a request id that no other frame has


class Attacker:
    """Makes messages of every bad kind, in a repeatable order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._client = ClientId(self._rng.randbytes(limits.CLIENT_ID_BYTES))
        self._kinds: list[Callable[[], bytes]] = [
            self._garbage,
            self._truncated,
            self._flipped,
            self._two_in_one,
            self._out_of_order,
            self._too_many_keys,
            self._other_version,
        ]

    def frames(self, count: int) -> Iterator[bytes]:
        """So many."""
        for _ in range(count):
            yield self._rng.choice(self._kinds)()

    def huge(self) -> Iterator[bytes]:
        """A batch of a million keys, and one that is just short enough to be read at all."""
        just_read = limits.FRAME_BYTES_MAX // (limits.KEY_BYTES + 2) - 100
        for count in (1_000_000, just_read):
            yield _request(self._client, ["Acquire", NAMESPACE, [bytes(32)] * count, bytes(16), 1.0])

    def last(self) -> bytes:
        """A Hello."""
        return encode(Request(VERSION, self._client, LAST, Hello()))

    def _key(self) -> Key:
        return Key(self._rng.randbytes(limits.KEY_BYTES))

    def _valid(self) -> bytes:
        key, rng = self._key(), self._rng
        lease = LeaseId(rng.randbytes(limits.LEASE_ID_BYTES))
        generation = Generation(rng.randbytes(limits.GENERATION_BYTES))
        bodies: list[RequestBody] = [
            Hello(NAMESPACE, MANIFEST.encode()),
            Reserve(NAMESPACE, (ReserveItem(key, key, 0, rng.randrange(1, 1 << 40)),), 1.0),
            Commit(NAMESPACE, (CommitItem(key, generation, bytes(64)),)),
            Abort(NAMESPACE, ((key, generation),), rng.random() < 0.5),
            Acquire(NAMESPACE, (key,) * rng.randrange(1, 20), lease, 1.0, rng.choice([0.0, 0.05])),
            Pages(lease, (key,)),
            Renew(lease, rng.choice([1.0, 0.0, 1e6])),
            Release(lease),
            Prefetch(NAMESPACE, (key,)),
            Suspect(NAMESPACE, key, generation, lease),
            Drop(NAMESPACE, (key,)),
        ]
        return encode(Request(VERSION, self._client, rng.randrange(1 << 32), rng.choice(bodies)))

    def _garbage(self) -> bytes:
        return self._rng.randbytes(self._rng.randrange(2_000))

    def _truncated(self) -> bytes:
        frame = self._valid()
        return frame[: self._rng.randrange(len(frame))]

    def _flipped(self) -> bytes:
        frame = bytearray(self._valid())
        frame[self._rng.randrange(len(frame))] ^= 1 << self._rng.randrange(8)
        return bytes(frame)

    def _two_in_one(self) -> bytes:
        return self._valid() + self._valid()

    def _out_of_order(self) -> bytes:
        return self._valid()

    def _too_many_keys(self) -> bytes:
        return _request(self._client, ["Prefetch", NAMESPACE, [bytes(32)] * (limits.BATCH_KEYS_MAX + 1)])

    def _other_version(self) -> bytes:
        return msgspec.msgpack.encode([self._rng.randrange(2, 1 << 40), self._client, 1, ["Future", {}]])


def _request(client: ClientId, body: Sequence[object]) -> bytes:
    return msgspec.msgpack.encode([VERSION, client, 1, body, b""])


def attack(node: str, seed: int, count: float, told: Connection) -> None:
    """Sends `count` frames over several connections, as fast as the node takes them; tells when that is done."""
    signal.alarm(LIVES_S * 20)
    attacker = Attacker(seed)
    connections = [RawConnection(node) for _ in range(CONNECTIONS)]
    told.send(0)  # it begins
    for number, frame in enumerate(attacker.frames(int(count))):
        if number % HUGE_EVERY == 0:
            _no_protocol_at_all(node)
            for huge in attacker.huge():
                _send_and_forget(node, huge)
            _begin_and_forget(node, frame)
        connections[number % CONNECTIONS].send(frame)
        if number % PAUSE_EVERY == 0:
            _take_replies(connections)
    for connection in connections:
        _wait_until_all_was_taken(connection, attacker)
    told.send(int(count))
    signal.pause()


def _take_replies(connections: Sequence[RawConnection]) -> None:
    for connection in connections:
        while connection.receive() is not None:
            pass


def _wait_until_all_was_taken(connection: RawConnection, attacker: Attacker) -> None:
    """Frames of a connection are handled in order: the last one is answered last."""
    connection.send(attacker.last())
    while (frame := connection.receive(LIVES_S)) is not None:
        if decode_reply(frame).request_id == LAST:
            return
    raise AssertionError("the node does not answer any more, or has ended the connection")


def _send_and_forget(node: str, frame: bytes) -> None:
    """Over a connection of its own: the node ends it when a frame is too large."""
    connection = RawConnection(node)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.send(frame)
        connection.receive(1.0)
    connection.close()


def _begin_and_forget(node: str, frame: bytes) -> None:
    """Half of a frame, and then nothing."""
    connection = RawConnection(node)
    connection.send_bytes(framed(frame)[: LENGTH_BYTES + len(frame) // 2])
    connection.close()


def _no_protocol_at_all(node: str) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\xff" * 64):
        RawConnection(node, preamble=data).close()
