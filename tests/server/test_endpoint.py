"""The socket under load: what holds without knowing what the frames say."""

import asyncio
import threading
import time
from functools import partial
from types import SimpleNamespace

import zmq

from kvstore.core import limits
from kvstore.server import endpoint as endpoint_module
from kvstore.server.endpoint import Endpoint
from kvstore.server.turns import Rest
from tests.server.raw import raw_peer
from tests.support import wait_until_async

IN_FLIGHT = 300
FLOOD = 2_000
WORK = 5_000  # additions per frame, so that frames come faster than they are handled


async def test_the_loop_gets_its_turn_during_a_flood() -> None:
    """Every frame that is received is answered by another one, so the socket is never empty.

    Mutant: a drain that only ends when nothing is left; the loop's next turn then comes after the flood.
    """
    received = 0

    def receive(peer: bytes, frame: bytes) -> None:
        nonlocal received
        received += 1
        sum(range(WORK))
        if received < FLOOD:
            flooder.socket.send(frame)

    endpoint = Endpoint("127.0.0.1:0", receive, lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as flooder:
        for _ in range(IN_FLIGHT):
            flooder.send(b"more")
        await wait_until_async(lambda: received > 2 * IN_FLIGHT)
        turns = 0
        while turns < 5:
            await asyncio.sleep(0)
            turns += 1
        assert received < FLOOD, "the loop was not given a turn"
        received = FLOOD  # ends it
    await endpoint.close()


async def test_a_small_frame_is_handled_between_two_slices_of_a_large_one() -> None:
    """Mutant: what is left of a frame is done at once."""
    handled: list[bytes] = []
    until_s = time.monotonic() + 10.0

    def go_on() -> Rest | None:
        if b"small" not in handled and time.monotonic() < until_s:
            return go_on
        handled.append(b"large")
        return None

    def receive(peer: bytes, frame: bytes) -> Rest | None:
        if frame == b"small":
            handled.append(frame)
            return None
        other.socket.send(b"small")
        return go_on

    endpoint = Endpoint("127.0.0.1:0", receive, lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer, raw_peer(endpoint.address) as other:
        peer.send(b"large")
        await wait_until_async(lambda: len(handled) == 2)
    assert handled == [b"small", b"large"]
    await endpoint.close()


async def test_a_peer_that_does_not_take_its_replies_is_told_apart_and_bounded(monkeypatch) -> None:
    """Mutant: no high-water mark, or a ROUTER that drops in silence."""
    monkeypatch.setattr(limits, "REPLIES_QUEUED_MAX", 16)
    peers: list[bytes] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, _: peers.append(peer), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        peer.socket.setsockopt(zmq.RCVHWM, 1)
        peer.send(b"hello")
        await wait_until_async(lambda: peers)
        assert endpoint.send(peers[0], b"answer")
        reply = bytes(1 << 20)
        sent = sum(endpoint.send(peers[0], reply) for _ in range(400))
        assert sent < 400
    await wait_until_async(lambda: not endpoint.send(peers[0], b"to nobody"))
    assert not endpoint.send(b"stranger", b"to nobody")
    await endpoint.close()
    assert not endpoint.send(peers[0], b"after the end")


async def test_a_frame_that_came_while_sending_is_not_forgotten() -> None:
    """ZMQ tells of news once, and a send may swallow it. Mutant: no drain after a send from outside a drain."""
    frames: list[bytes] = []

    def has(number: int) -> bool:
        return len(frames) == number

    endpoint = Endpoint("127.0.0.1:0", lambda peer, frame: frames.append(peer), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        for done in range(0, 60, 2):
            peer.send(b"ask")
            await wait_until_async(partial(has, done + 1))
            peer.send(b"ask again")
            endpoint.send(frames[0], b"answer")
            await wait_until_async(partial(has, done + 2))
    await endpoint.close()


async def test_stop_reading_leaves_replies_possible() -> None:
    peers: list[bytes] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, _: peers.append(peer), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        peer.send(b"one")
        await wait_until_async(lambda: peers)
        endpoint.stop_reading()
        peer.send(b"two")
        assert endpoint.send(peers[0], b"answer")
        await wait_until_async(lambda: peer.socket.poll(0))
        assert len(peers) == 1
    await endpoint.close()


async def test_a_connection_that_does_not_end_does_not_keep_the_node(monkeypatch, caplog) -> None:
    """libzmq has been seen to hang in its `term`. Mutant: wait for it."""
    monkeypatch.setattr(endpoint_module, "END_S", 0.05)
    endpoint = Endpoint("127.0.0.1:0", lambda peer, _: None, lambda: None)
    await endpoint.start()
    context, hang = endpoint._context, threading.Event()
    assert context is not None
    endpoint._context = SimpleNamespace(term=hang.wait)  # type: ignore[assignment]
    await endpoint.close()
    assert "did not end" in caplog.text
    hang.set()
    context.term()
