"""Both ends of a connection, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest

from kvstore.core import limits
from kvstore.stream import FrameStream, connect
from tests.support import free_port, wait_until_async


class End:
    """A stream, and what it told."""

    def __init__(self) -> None:
        self.opened = 0
        self.ended = 0
        self.frames: list[bytes] = []
        self.stream = FrameStream(self._opened, self._came, self._ended)

    @property
    def socket(self) -> socket.socket:
        assert self.stream._transport is not None
        connection: socket.socket = self.stream._transport.get_extra_info("socket")
        return connection

    def _opened(self, _: FrameStream) -> None:
        self.opened += 1

    def _came(self, stream: FrameStream) -> None:
        while (frame := stream.take()) is not None:
            self.frames.append(frame)

    def _ended(self, _: FrameStream) -> None:
        self.ended += 1


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    """A connected pair, one of them made by a listener."""
    here, there = End(), End()
    server = await asyncio.get_running_loop().create_server(lambda: there.stream, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    await connect(f"{host}:{port}", here.stream)
    await wait_until_async(lambda: here.stream.greeted and there.stream.greeted)
    yield here, there
    here.stream.abort()
    there.stream.abort()
    server.close()
    await wait_until_async(lambda: here.ended == there.ended == 1)


async def test_frames_go_both_ways(ends) -> None:
    here, there = ends
    sent = [b"", b"one", bytes(3 * limits.MIB)]
    assert all(here.stream.send(frame) for frame in sent)
    assert there.stream.send(b"back")
    await wait_until_async(lambda: there.frames == sent and here.frames == [b"back"])
    assert (here.opened, here.ended) == (1, 0)


async def test_who_is_not_read_from_is_bounded_and_goes_on_where_it_was(ends, monkeypatch) -> None:
    """Mutants: keep all that is sent; a pause that reads on; a resume that does not."""
    monkeypatch.setattr(limits, "UNSENT_BYTES_MAX", 2 * limits.MIB)
    here, there = ends
    there.stream.pause()
    sent = [bytes([number]) * limits.MIB for number in range(100)]
    taken = [frame for frame in sent if here.stream.send(frame)]
    assert len(taken) < len(sent)
    assert here.stream.unsent_bytes <= 3 * limits.MIB + 100
    for _ in range(20):
        await asyncio.sleep(0)
    assert not there.frames
    there.stream.resume()
    await wait_until_async(lambda: there.frames == taken)
    assert here.stream.send(b"again")


async def test_close_ends_when_all_was_taken(ends) -> None:
    """Mutant: close is abort."""
    here, there = ends
    there.stream.pause()
    frame = bytes(16 * limits.MIB)
    assert here.stream.send(frame)
    assert here.stream.unsent_bytes, "all of it is with the kernel: this shows nothing"
    here.stream.close()
    assert not here.stream.send(b"too late")
    there.stream.resume()
    await wait_until_async(lambda: there.frames == [frame] and there.ended == 1)
    here.stream.abort()  # mutant: the transport is kept, and asyncio ends it twice
    here.stream.close()
    assert not here.stream.send(b"after the end")


async def test_abort_does_not_wait(ends) -> None:
    here, there = ends
    there.stream.pause()
    assert here.stream.send(bytes(16 * limits.MIB))
    here.stream.abort()
    await wait_until_async(lambda: here.ended == 1)
    there.stream.resume()
    await wait_until_async(lambda: there.ended == 1)
    assert not there.frames


async def test_frames_leave_at_once_and_a_vanished_end_is_noticed(ends) -> None:
    """Mutants: leave it to asyncio, or to the kernel's two hours, on either side."""
    for end in ends:
        assert end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, interval_s, probes = (
            end.socket.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + interval_s * probes == 20
        assert end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


async def test_a_connection_to_itself_is_none(monkeypatch) -> None:
    """The kernel makes one where nobody listens, now and then. Mutant: it is a node that says what it is told."""
    loop, port = asyncio.get_running_loop(), free_port()
    from_there = partial(loop.create_connection, local_addr=("127.0.0.1", port))
    monkeypatch.setattr(loop, "create_connection", from_there)
    end = End()
    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        await connect(f"127.0.0.1:{port}", end.stream)
    await wait_until_async(lambda: end.ended == 1)
    assert end.opened == 1, "there was none: this shows nothing"
