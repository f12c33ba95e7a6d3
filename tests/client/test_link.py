"""How a link comes to its connection, and what becomes of requests meanwhile."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvstore.client import link as link_module
from kvstore.client.config import new_client_id
from kvstore.client.link import Link
from kvstore.core import PeerLost
from kvstore.stream import PREAMBLE, FrameStream
from kvstore.wire import Hello, Welcome
from tests.support import free_port, wait_until_async
from tests.support.control_node import ControlNode, running

pytestmark = pytest.mark.filterwarnings("error")


class Listener:
    """Accepts, says what it was told to say, and counts."""

    def __init__(self, says: bytes) -> None:
        self.says = says
        self.accepted = 0
        self.received = b""
        self.gone = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        writer.write(self.says)
        try:
            while data := await reader.read(1 << 16):
                self.received += data
        finally:
            self.gone += 1
            writer.close()


@asynccontextmanager
async def listening(says: bytes) -> AsyncIterator[tuple[Listener, str]]:
    listener = Listener(says)
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield listener, f"{host}:{port}"
    server.close()
    await wait_until_async(lambda: listener.gone == listener.accepted)


@asynccontextmanager
async def linked(address: str) -> AsyncIterator[Link]:
    link = Link(address, new_client_id(), b"")
    try:
        yield link
    finally:
        link.close()
        with pytest.raises(asyncio.CancelledError):
            await link._connecting


async def test_who_accepts_and_says_nothing_is_given_up_and_tried_again(monkeypatch) -> None:
    """A node that is stopped: the kernel accepts for it. Mutants: that is a connection; wait for it for ever."""
    monkeypatch.setattr(link_module, "CONNECT_S", 0.05)
    async with listening(b"") as (listener, address), linked(address) as link:
        assert not link.post(Hello())
        with pytest.raises(PeerLost, match="is it running"):
            await link.ask(Hello())
        await wait_until_async(lambda: listener.accepted >= 3)
        assert listener.received == PREAMBLE * listener.accepted, "a request was sent to nobody"


async def test_something_else_that_listens_there_is_said(monkeypatch) -> None:
    """Mutant: its bytes are waited for to become a frame."""
    async with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as (_, address), linked(address) as link:
        with pytest.raises(PeerLost, match=f"{address}.*does not speak this protocol"):
            await link.ask(Hello())


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 64, "a..b"])
async def test_a_name_that_is_none_fails_requests_and_is_tried_again(host, monkeypatch) -> None:
    """Mutant: what the resolver raises ends the link."""
    monkeypatch.setattr(link_module, "RECONNECT_S", 0.001)
    async with linked(f"{host}:7400") as link:
        for _ in range(3):
            with pytest.raises(PeerLost, match="no connection to node"):
                await link.ask(Hello())


async def test_a_node_that_comes_or_comes_back_is_connected_to() -> None:
    node = ControlNode(listen=f"127.0.0.1:{free_port()}")
    async with linked(node.address) as link:

        async def answered() -> bool:
            try:
                return isinstance((await link.ask(Hello())).body, Welcome)
            except PeerLost:
                return False

        assert not await answered()
        for _ in range(2):
            async with running(node):
                async with asyncio.timeout(10.0):
                    while not await answered():
                        pass
            assert not await answered()


async def test_a_name_with_addresses_of_both_kinds_finds_a_node_of_one() -> None:
    async with running(ControlNode(listen="127.0.0.1:0")) as node:
        port = node.address.rpartition(":")[2]
        async with linked(f"localhost:{port}") as link:
            assert isinstance((await link.ask(Hello())).body, Welcome)


@pytest.mark.parametrize("when", ["at once", "connecting", "connected"])
async def test_a_link_that_is_closed_leaves_nothing_behind(when) -> None:
    """Mutant: what was connecting goes on."""
    async with listening(PREAMBLE if when == "connected" else b"") as (listener, address):
        link = Link(address, new_client_id(), b"")
        until: dict[str, Callable[[], object]] = {
            "at once": lambda: True,
            "connecting": lambda: listener.accepted,
            "connected": lambda: link._stream,
        }
        await wait_until_async(until[when])
        link.close()
        link.close()
        with pytest.raises(asyncio.CancelledError):
            await link._connecting
        await wait_until_async(lambda: listener.gone == listener.accepted)
        with pytest.raises(PeerLost, match="closed"):
            await link.ask(Hello())
        await asyncio.sleep(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gc.collect()
        assert not [each for each in asyncio.all_tasks() if each.get_name().startswith("link to")]


async def test_a_connection_that_breaks_fails_what_waits_for_a_reply_and_is_made_again() -> None:
    async with running(ControlNode()) as node, linked(node.address) as link:
        await link.ask(Hello())
        endpoint, heard = node.server._endpoint, list[FrameStream]()
        receive, endpoint._receive = endpoint._receive, lambda peer, _: heard.append(peer)
        waiting = asyncio.create_task(link.ask(Hello()))
        await wait_until_async(lambda: heard)
        endpoint._receive = receive
        heard[0].abort()
        with pytest.raises(PeerLost, match="is it running"):
            await waiting
        assert not link.post(Hello())
        assert isinstance((await link.ask(Hello())).body, Welcome)
