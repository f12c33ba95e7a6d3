"""Frames that no honest client sends, by a process of its own."""

import contextlib
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import msgspec
import zmq

from kvstore.core import Key, limits
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
    encode,
)
from tests.faults.clients import LIVES_S, MANIFEST

SOCKETS = 4
HUGE_EVERY = 2_000
NAMESPACE = MANIFEST.namespace
PAUSE_EVERY = 64


class Attacker:
    """Makes messages of every bad kind, in a repeatable order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._client = ClientId(self._rng.randbytes(limits.CLIENT_ID_BYTES))
        self._kinds: list[Callable[[], list[bytes]]] = [
            self._garbage,
            self._truncated,
            self._flipped,
            self._many_parts,
            self._out_of_order,
            self._too_many_keys,
            self._other_version,
        ]

    def messages(self, count: int) -> Iterator[list[bytes]]:
        """So many messages, as lists of frames."""
        for _ in range(count):
            yield self._rng.choice(self._kinds)()

    def huge(self) -> Iterator[list[bytes]]:
        """A batch of a million keys, and one that is just short enough to be read at all."""
        just_read = limits.FRAME_BYTES_MAX // (limits.KEY_BYTES + 2) - 100
        for count in (1_000_000, just_read):
            yield [_request(self._client, ["Acquire", NAMESPACE, [bytes(32)] * count, bytes(16), 1.0])]

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

    def _garbage(self) -> list[bytes]:
        return [self._rng.randbytes(self._rng.randrange(2_000))]

    def _truncated(self) -> list[bytes]:
        frame = self._valid()
        return [frame[: self._rng.randrange(len(frame))]]

    def _flipped(self) -> list[bytes]:
        frame = bytearray(self._valid())
        frame[self._rng.randrange(len(frame))] ^= 1 << self._rng.randrange(8)
        return [bytes(frame)]

    def _many_parts(self) -> list[bytes]:
        return [self._valid() for _ in range(self._rng.randrange(2, 9))]

    def _out_of_order(self) -> list[bytes]:
        return [self._valid()]

    def _too_many_keys(self) -> list[bytes]:
        return [_request(self._client, ["Prefetch", NAMESPACE, [bytes(32)] * (limits.BATCH_KEYS_MAX + 1)])]

    def _other_version(self) -> list[bytes]:
        return [msgspec.msgpack.encode([self._rng.randrange(2, 1 << 40), self._client, 1, ["Future", {}]])]


def _request(client: ClientId, body: Sequence[object]) -> bytes:
    return msgspec.msgpack.encode([VERSION, client, 1, body, b""])


def attack(node: str, seed: int, count: float, told: Connection) -> None:
    """Sends `count` messages over several sockets, as fast as the node takes them; tells when that is done."""
    signal.alarm(LIVES_S * 20)
    attacker, context = Attacker(seed), zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in range(SOCKETS)]
    for dealer in dealers:
        dealer.setsockopt(zmq.LINGER, 5_000)
        dealer.connect(f"tcp://{node}")
    told.send(0)  # it begins
    for number, frames in enumerate(attacker.messages(int(count))):
        if number % HUGE_EVERY == 0:
            _no_protocol_at_all(node)
            for huge in attacker.huge():
                _send_and_forget(context, node, huge)
        dealer = dealers[number % SOCKETS]
        dealer.send_multipart(frames)
        if number % PAUSE_EVERY == 0:
            _take_replies(dealers)
    _take_replies(dealers)
    told.send(int(count))
    signal.pause()


def _take_replies(dealers: list["zmq.Socket[bytes]"]) -> None:
    for dealer in dealers:
        with contextlib.suppress(zmq.Again):
            while True:
                dealer.recv(zmq.DONTWAIT)


def _send_and_forget(context: "zmq.Context[zmq.Socket[bytes]]", node: str, frames: list[bytes]) -> None:
    """Over a connection of its own: the node ends it when a frame is too large."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{node}")
        dealer.send_multipart(frames)
        dealer.poll(1_000)


def _no_protocol_at_all(node: str) -> None:
    host, _, port = node.rpartition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\xff" * 64):
        with socket.create_connection((host, int(port))) as stream:
            stream.sendall(data)
