"""The conversation with one node, over real sockets: Hello, boots, deadlines, replies that come too late."""

import asyncio
import time

import pytest

from kvstore.client import ControlClient
from kvstore.client.config import new_client_id
from kvstore.core import BadConfiguration, BadRequest, NotAuthorised, PeerLost, limits
from kvstore.server import ControlServer
from kvstore.stream import FrameStream
from kvstore.wire import (
    Abort,
    Acquire,
    Acquired,
    Granted,
    Hello,
    LeaseId,
    LeaseState,
    Prefetch,
    Release,
    Renew,
    ReplyBody,
    RequestBody,
    Reserve,
    Reserved,
)
from tests.support import free_port, wait_until_async
from tests.support.control_node import MANIFEST, NAMESPACE, ControlNode, chain, eventually, items, running

LEASE = LeaseId(b"l" * 16)
MANIFESTS = {NAMESPACE: MANIFEST.encode()}


@pytest.fixture
async def node():
    async with running(ControlNode()) as node:
        yield node


@pytest.fixture
async def client(node):
    client = ControlClient(node.address, new_client_id(), manifests=MANIFESTS)
    yield client
    client.close()


async def test_the_first_call_says_hello_by_itself_and_the_next_does_not(node, client) -> None:
    ask = Acquire(NAMESPACE, tuple(chain(1)), LEASE, 1.0)
    answers = [await client.ask(ask, 5.0, namespace=NAMESPACE) for _ in range(3)]
    assert all(isinstance(answer.body, Acquired) for answer in answers)
    address = answers[0].address
    assert node.server.stats.requests == {"Hello": 1, "Acquire": 3}
    assert address.boot == node.boot
    assert address.segments == {"in_process": node.transfer.segment}
    assert (address.arena_base, address.control) == (node.arena.address, node.address)


async def test_concurrent_first_calls_say_one_hello(node, client) -> None:
    """Mutant: no lock around the greeting."""
    ask = Acquire(NAMESPACE, tuple(chain(1)), LEASE, 1.0)
    await asyncio.gather(*(client.ask(ask, 5.0, namespace=NAMESPACE) for _ in range(20)))
    assert node.server.stats.requests == {"Hello": 1, "Acquire": 20}


async def test_replies_find_their_requests_in_any_order(node, client) -> None:
    """A parked request is overtaken by later ones."""
    parked = asyncio.create_task(
        client.ask(Acquire(NAMESPACE, tuple(chain(1)), LEASE, 5.0, wait_s=0.1), 5.0, namespace=NAMESPACE)
    )
    await wait_until_async(lambda: node.server.stats.parked == 1)
    assert (await client.hello(5.0)).node == node.node
    assert not parked.done()
    assert isinstance((await parked).body, Acquired)


@pytest.mark.parametrize(
    ("body", "namespace"),
    [(Acquire(NAMESPACE, tuple(chain(1)), LEASE, 1.0), NAMESPACE), (Renew(LEASE, 1.0), None)],
)
async def test_a_restarted_node_is_noticed_and_the_request_is_said_again(
    node, client, body, namespace
) -> None:
    """Mutant: keep the old boot's address; the reader would read at an address of the dead arena."""
    await client.ask(Reserve(NAMESPACE, tuple(items(chain(1))), 5.0), 5.0, namespace=NAMESPACE)
    old = client.address
    await node.stop()
    await node.start()

    async def ask() -> bool:
        try:
            answer = await client.ask(body, 5.0, namespace=namespace)
        except PeerLost:
            return False  # the old connection broke under it
        assert answer.address.boot == node.boot
        assert answer.address.arena_base == node.arena.address
        return True

    await eventually(ask)
    assert old is not None
    assert old.boot != node.boot
    assert client.boots_seen == 2


async def test_a_namespace_that_the_node_has_forgotten_is_opened_again(node, client) -> None:
    """The boot is the same; the node dropped the namespace to make room for others."""
    ask = Acquire(NAMESPACE, tuple(chain(1)), LEASE, 5.0)
    await client.ask(ask, 5.0, namespace=NAMESPACE)
    node.store._namespaces._open.clear()
    assert isinstance((await client.ask(ask, 5.0, namespace=NAMESPACE)).body, Acquired)
    assert node.server.stats.failures == {"namespace_unknown": 1}


async def test_a_namespace_that_was_never_opened_here_is_the_callers_mistake(client) -> None:
    client._manifests = {}
    with pytest.raises(BadRequest, match="has not been opened"):
        await client.ask(Acquire(NAMESPACE, (), LEASE, 1.0), 5.0, namespace=NAMESPACE)


async def test_a_wrong_token_is_said(node) -> None:
    async with running(ControlNode(token=b"secret")) as guarded:
        client = ControlClient(guarded.address, new_client_id(), b"wrong")
        with pytest.raises(NotAuthorised, match="token"):
            await client.hello(5.0)
        client.close()


async def test_a_refusal_is_raised_as_what_it_is(client) -> None:
    with pytest.raises(BadRequest, match="manifest"):
        await client.ask(Hello(NAMESPACE, b"{}"), 5.0)


async def test_a_node_that_fails_at_a_request_counts_as_lost(node, client, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(node.store, "prefetch", broken)
    with pytest.raises(PeerLost, match="failed at this request"):
        await client.ask(Prefetch(NAMESPACE, ()), 5.0, namespace=NAMESPACE)


async def test_nobody_there_is_told_long_before_the_deadline() -> None:
    """Mutant: wait for the deadline although the connection is refused."""
    client = ControlClient(f"127.0.0.1:{free_port()}", new_client_id())
    start = time.monotonic()
    with pytest.raises(PeerLost, match="is it running"):
        await client.hello(30.0)
    assert time.monotonic() - start < 10.0
    client.close()


async def test_a_node_that_dies_fails_what_was_sent_to_it(node, client) -> None:
    parked = asyncio.create_task(
        client.ask(Acquire(NAMESPACE, tuple(chain(1)), LEASE, 20.0, wait_s=20.0), 25.0, namespace=NAMESPACE)
    )
    await wait_until_async(lambda: node.server.stats.parked == 1)
    await node.die()
    with pytest.raises(PeerLost, match="no connection"):
        await parked
    await node.start()


async def test_a_silent_node_is_lost_at_the_deadline(node, client) -> None:
    """It accepts and never answers, as a stopped process does."""
    await client.hello(5.0)
    node.server._endpoint.stop_reading()
    with pytest.raises(PeerLost, match=r"did not answer within 0\.1 s"):
        await client.ask(Hello(), 0.1)


async def test_a_request_whose_caller_has_gone_is_not_sent_later() -> None:
    """Mutant: queue it in the socket; a node that comes up is then asked by requests nobody waits for."""
    port = free_port()
    client = ControlClient(f"127.0.0.1:{port}", new_client_id(), manifests=MANIFESTS)
    for _ in range(5):
        with pytest.raises(PeerLost):
            await client.ask(Reserve(NAMESPACE, tuple(items(chain(1))), 5.0), 0.05, namespace=NAMESPACE)
    async with running(ControlNode(listen=f"127.0.0.1:{port}")) as node:

        async def greeted() -> bool:
            try:
                await client.hello(1.0)
            except PeerLost:
                return False
            return True

        await eventually(greeted)
        assert node.server.stats.requests == {"Hello": 1}
    client.close()


async def test_a_grant_that_comes_too_late_is_given_back(node, client, monkeypatch) -> None:
    """The caller is cancelled while the node works. Mutant: forget the request with its caller."""
    undone: list[ReplyBody] = []

    def undo(late: ReplyBody) -> RequestBody | None:
        undone.append(late)
        assert isinstance(late, Reserved)
        assert isinstance(late.answers[0], Granted)
        return Abort(NAMESPACE, ((items(chain(1))[0].key, late.answers[0].generation),), quiet=True)

    await client.ask(Hello(), 5.0, namespace=NAMESPACE)
    hold = HeldReplies(node.server, monkeypatch)
    asking = asyncio.create_task(
        client.ask(Reserve(NAMESPACE, tuple(items(chain(1))), 60.0), 5.0, namespace=NAMESPACE, undo=undo)
    )
    await wait_until_async(lambda: hold.held)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert node.store.snapshot().reservations == 1
    hold.let_go()
    await wait_until_async(lambda: node.store.snapshot().reservations == 0)
    assert len(undone) == 1


async def test_a_grant_that_comes_with_the_cancellation_is_given_back(node, client) -> None:
    """The reply is there, but the caller is cancelled before its turn. Mutant: only replies to come are late."""
    (item,) = items(chain(1))

    def undo(late: ReplyBody) -> RequestBody | None:
        assert isinstance(late, Reserved)
        assert isinstance(late.answers[0], Granted)
        return Abort(NAMESPACE, ((item.key, late.answers[0].generation),), quiet=True)

    await client.ask(Hello(), 5.0, namespace=NAMESPACE)
    receive = client._link._receive

    def received(frame: bytes) -> None:
        receive(frame)
        asking.cancel()

    client._link._receive = received
    asking = asyncio.create_task(
        client.ask(Reserve(NAMESPACE, (item,), 60.0), 5.0, namespace=NAMESPACE, undo=undo)
    )
    with pytest.raises(asyncio.CancelledError):
        await asking
    client._link._receive = receive
    await wait_until_async(lambda: node.server.stats.requests.get("Abort") == 1)
    assert node.store.snapshot().reservations == 0


async def test_a_post_is_sent_and_its_reply_ignored(node, client) -> None:
    await client.hello(5.0)
    assert client.post(Release(LEASE))
    await wait_until_async(lambda: node.server.stats.requests.get("Release"))
    assert (await client.hello(5.0)).node == node.node


async def test_garbage_from_a_node_is_counted_and_costs_the_deadline_only(node, client) -> None:
    await client.hello(5.0)
    peers: list[FrameStream] = []
    node.server._endpoint._receive = lambda peer, _: peers.append(peer)
    with pytest.raises(PeerLost):
        await client.ask(Hello(), 0.1)
    node.server._endpoint.send(peers[0], b"garbage")
    await wait_until_async(lambda: client._link.garbage_frames == 1)


async def test_after_close_every_call_is_lost_at_once(client) -> None:
    await client.hello(5.0)
    waiting = asyncio.create_task(
        client.ask(Acquire(NAMESPACE, tuple(chain(1)), LEASE, 9.0, wait_s=9.0), 10.0, namespace=NAMESPACE)
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.close()
    with pytest.raises(PeerLost):
        await waiting
    with pytest.raises(PeerLost, match="closed"):
        await client.hello(5.0)
    assert not client.post(Release(LEASE))


class HeldReplies:
    """Keeps a server's replies back until told."""

    def __init__(self, server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[tuple[FrameStream, bytes]] = []
        self._endpoint = server._endpoint
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(self._endpoint, "send", self._hold)

    def _hold(self, peer: FrameStream, frame: bytes) -> bool:
        self.held.append((peer, frame))
        return True

    def let_go(self) -> None:
        self._monkeypatch.undo()
        for peer, frame in self.held:
            self._endpoint.send(peer, frame)


async def test_more_requests_than_may_be_in_flight_are_all_answered(node, client) -> None:
    """Mutant: send them all at once, and the node's queue of replies overflows."""
    await client.hello(5.0)
    most = 0

    def watched(peer: FrameStream, frame: bytes) -> None:
        nonlocal most
        most = max(most, len(client._link._waiting) - len(client._link._unsent))
        receive(peer, frame)

    receive = node.server._endpoint._receive
    node.server._endpoint._receive = watched
    number = 4 * limits.REQUESTS_IN_FLIGHT_MAX
    answers = await asyncio.gather(*(client.ask(Renew(LEASE, 1.0), 20.0) for _ in range(number)))
    assert all(answer.body == LeaseState(0.0) for answer in answers)
    assert most <= limits.REQUESTS_IN_FLIGHT_MAX
    assert node.server.stats.lost_replies == 0


@pytest.mark.parametrize("control", ["7400", "127.0.0.1:port", "127.0.0.1", "a b:1"])
async def test_an_address_that_is_none_is_refused(control) -> None:
    with pytest.raises(BadConfiguration, match="looks like"):
        ControlClient(control, new_client_id())
