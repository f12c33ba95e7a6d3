"""The socket under load: what holds without knowing what the frames say."""

import asyncio
import gc
import re
import socket
import time
import weakref
from functools import partial

import pytest

from kvstore.core import BadConfiguration, limits
from kvstore.server import endpoint as endpoint_module
from kvstore.server.endpoint import Endpoint, Peer
from kvstore.server.turns import FRAMES_HELD, Rest
from kvstore.stream import PREAMBLE, framed
from tests.server.raw import RawPeer, raw_peer
from tests.support import wait_until_async

IN_FLIGHT = 300
FLOOD = 2_000
WORK = 5_000  # additions per frame, so that frames come faster than they are handled


async def test_the_loop_gets_its_turn_during_a_flood() -> None:
    """Every frame that is received is answered by another one, so the socket is never empty.

    Mutant: a drain that only ends when nothing is left; the loop's next turn then comes after the flood.
    """
    received = 0

    def receive(peer: Peer, frame: bytes) -> None:
        nonlocal received
        received += 1
        sum(range(WORK))
        if received < FLOOD:
            flooder.send(frame)

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

    def receive(peer: Peer, frame: bytes) -> Rest | None:
        if frame == b"small":
            handled.append(frame)
            return None
        other.send(b"small")
        return go_on

    endpoint = Endpoint("127.0.0.1:0", receive, lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer, raw_peer(endpoint.address) as other:
        peer.send(b"large")
        await wait_until_async(lambda: len(handled) == 2)
    assert handled == [b"small", b"large"]
    await endpoint.close()


async def test_a_peer_that_does_not_take_its_replies_is_told_apart_and_bounded(monkeypatch) -> None:
    """Mutant: as much is kept for it as there is."""
    monkeypatch.setattr(limits, "UNSENT_BYTES_MAX", 4 << 20)
    peers: list[Peer] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, _: peers.append(peer), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        peer.send(b"hello")
        await wait_until_async(lambda: peers)
        assert endpoint.send(peers[0], b"answer")
        reply = bytes(1 << 20)
        sent = sum(endpoint.send(peers[0], reply) for _ in range(400))
        assert sent < 400
        assert peers[0].unsent_bytes <= (5 << 20) + 100
    await wait_until_async(lambda: not endpoint.send(peers[0], b"to nobody"))
    await endpoint.close()
    assert not endpoint.send(peers[0], b"after the end")


async def test_a_peer_that_floods_the_node_is_not_read_from_meanwhile_and_waits_behind_itself() -> None:
    """Mutants: all that comes is taken; who has more to say comes first."""
    handled: list[bytes] = []
    go_on = asyncio.Event()

    def receive(peer: Peer, frame: bytes) -> Rest | None:
        handled.append(frame)
        return None if go_on.is_set() else lambda: receive(peer, frame)

    endpoint = Endpoint("127.0.0.1:0", receive, lambda: None)
    await endpoint.start()
    loop = asyncio.get_running_loop()
    large = bytes(limits.MIB)
    with raw_peer(endpoint.address) as flooder, raw_peer(endpoint.address) as other:
        flood = loop.run_in_executor(None, flooder.send_bytes, 64 * framed(large))
        await wait_until_async(lambda: endpoint._turns.full)
        other.send(b"polite")
        turns = len(handled)
        await wait_until_async(lambda: len(handled) > turns + 1_000)
        held = sum(len(peer._reader._buffer) for peer in endpoint._peers)
        assert not flood.done(), "it was taken although there was no room"
        assert held < 4 * limits.MIB
        handled.clear()
        go_on.set()
        await wait_until_async(lambda: b"polite" in handled)
        assert handled.index(b"polite") <= FRAMES_HELD
        await flood
        await wait_until_async(lambda: handled.count(large) >= 63)
    await endpoint.close()


async def test_a_flood_of_small_frames_stays_with_who_sends_it() -> None:
    """Mutant: only who finds no room is not read from; there is some whenever a frame was handled, and bytes come
    faster than frames are handled."""
    handled = 0

    def receive(peer: Peer, frame: bytes) -> None:
        nonlocal handled
        handled += 1
        sum(range(WORK))

    endpoint = Endpoint("127.0.0.1:0", receive, lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as flooder:
        flooder._socket.settimeout(10.0)
        data = framed(bytes(60)) * 500_000  # more than the kernel keeps: what it keeps shows nothing
        flood = asyncio.get_running_loop().run_in_executor(None, flooder.send_bytes, data)
        held = 0
        async with asyncio.timeout(30.0):
            while handled < 5_000:
                await asyncio.sleep(0)
                held = max(held, sum(len(peer._reader._buffer) for peer in endpoint._peers))
        assert not flood.done(), "it was taken although it was not handled"
        assert 0 < held < limits.MIB
        endpoint.stop_reading()
        await endpoint.close()
        with pytest.raises(ConnectionError):
            await flood


async def test_who_does_not_say_in_time_what_it_speaks_is_ended(monkeypatch) -> None:
    """Mutants: it stays; half a preamble is enough; who has greeted is ended, too."""
    monkeypatch.setattr(endpoint_module, "GREETING_S", 0.5)
    malformed: list[None] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, frame: None, lambda: malformed.append(None))
    await endpoint.start()
    with (
        raw_peer(endpoint.address, preamble=b"") as silent,
        raw_peer(endpoint.address, preamble=PREAMBLE[:-1]) as slow,
        raw_peer(endpoint.address) as polite,
    ):
        await silent.end()
        await slow.end()
        assert len(malformed) == 2
        later = RawPeer(endpoint.address, preamble=b"")  # a later deadline than the polite one's
        await later.end()
        later.close()
        assert polite.receive() is None
        assert not polite.ended
    await wait_until_async(lambda: not endpoint._peers)
    await endpoint.close()


async def test_a_peer_that_went_before_it_greeted_is_forgotten() -> None:
    """Mutant: its deadline keeps what it said."""
    malformed: list[None] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, frame: None, lambda: malformed.append(None))
    await endpoint.start()
    with raw_peer(endpoint.address, preamble=PREAMBLE[:-1]):
        await wait_until_async(lambda: endpoint._peers)
        (peer,) = (weakref.ref(peer) for peer in endpoint._peers)

    def forgotten() -> bool:
        gc.collect()
        return peer() is None

    await wait_until_async(forgotten, 5.0)
    assert not malformed
    await endpoint.close()


@pytest.mark.parametrize("listen", ["a..b:7400", "a" * 64 + ":7400", "127.0.0.1:65536", "127.0.0.1:\u00b2"])
async def test_what_is_no_address_is_said(listen) -> None:
    """Mutants: what the resolver, or bind, raises comes out as it is."""
    with pytest.raises(BadConfiguration, match=re.escape(repr(listen))):
        await Endpoint(listen, lambda peer, frame: None, lambda: None).start()


async def test_what_a_peer_said_before_it_went_is_handled() -> None:
    """Mutant: what waits is forgotten with the connection."""
    heard: list[tuple[Peer, bytes]] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, frame: heard.append((peer, frame)), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        peer.send(bytes(1))
        await wait_until_async(lambda: heard)
        endpoint.send(heard[0][0], b"go on")
        await wait_until_async(lambda: peer.receive() == b"go on")
        for number in range(1, 2 * FRAMES_HELD):
            peer.send(bytes([number]))
    await wait_until_async(lambda: [frame[0] for _, frame in heard] == list(range(2 * FRAMES_HELD)))
    await endpoint.close()


async def test_the_last_replies_leave_before_the_port_is_given_back() -> None:
    """More than the kernel takes at once. Mutant: connections are cut at the end."""
    peers: list[Peer] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, _: peers.append(peer), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        peer.send(b"hello")
        await wait_until_async(lambda: peers)
        reply = bytes(16 << 20)
        assert endpoint.send(peers[0], reply)
        assert peers[0].unsent_bytes, "all of it is with the kernel: this shows nothing"
        received = asyncio.get_running_loop().run_in_executor(None, partial(peer.receive, 10.0))
        await endpoint.close()
        assert await received == reply


async def test_replies_leave_at_once() -> None:
    """Mutant: what asyncio does by itself, which is nothing for connections to a socket that it was given."""
    peers: list[Peer] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, _: peers.append(peer), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        peer.send(b"hello")
        await wait_until_async(lambda: peers)
        assert peers[0]._transport is not None
        connection = peers[0]._transport.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await endpoint.close()


async def test_stop_reading_leaves_replies_possible() -> None:
    peers: list[Peer] = []
    endpoint = Endpoint("127.0.0.1:0", lambda peer, _: peers.append(peer), lambda: None)
    await endpoint.start()
    with raw_peer(endpoint.address) as peer:
        peer.send(b"one")
        await wait_until_async(lambda: peers)
        endpoint.stop_reading()
        peer.send(b"two")
        assert endpoint.send(peers[0], b"answer")
        await wait_until_async(lambda: peer.receive() == b"answer")
        assert len(peers) == 1
    await endpoint.close()
