"""Acquire that waits: it ends when there is nothing to wait for any more, and never holds what nobody wants."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from kvstore.core import MissReason, limits
from kvstore.wire import (
    Abort,
    Acquire,
    AcquireAnswer,
    Acquired,
    ClientId,
    Commit,
    CommitItem,
    Done,
    Drop,
    Filling,
    Granted,
    Hello,
    LeaseId,
    Miss,
    Release,
    ReplyBody,
    Request,
    RequestBody,
    Reserve,
    Reserved,
    Resident,
    Suspect,
    Welcome,
    decode_reply,
    encode,
)
from tests.server.raw import RawPeer, raw_peer
from tests.support import wait_until_async
from tests.support.control_node import (
    MANIFEST,
    NAMESPACE,
    TABLE,
    ControlNode,
    chain,
    items,
    running,
)

LEASE = LeaseId(b"l" * 16)
KEYS = chain(4)
READER = b"r" * 16
WRITER = b"c" * 16
WAITING = Acquire(NAMESPACE, tuple(KEYS), LEASE, 30.0, 20.0)


@pytest.fixture
async def node():
    async with running(ControlNode()) as node:
        yield node


@pytest.fixture
async def writer(node):
    with raw_peer(node.address, client=WRITER) as peer:
        assert isinstance((await peer.ask(Hello(NAMESPACE, MANIFEST.encode()))).body, Welcome)
        yield peer


@pytest.fixture
def reader(node, writer):
    with raw_peer(node.address, client=READER) as peer:
        yield peer


async def reserved(writer: RawPeer, keys=KEYS, duration_s: float = 30.0) -> list[CommitItem]:
    body = (await writer.ask(Reserve(NAMESPACE, tuple(items(keys)), duration_s))).body
    assert isinstance(body, Reserved)
    return [
        CommitItem(key, answer.generation, TABLE)
        for key, answer in zip(keys, body.answers, strict=True)
        if isinstance(answer, Granted)
    ]


async def commit(writer: RawPeer, some: list[CommitItem]) -> None:
    await writer.ask(Commit(NAMESPACE, tuple(some)))


def park(
    reader: RawPeer, wait_s: float = 20.0, keys=KEYS, request_id: int = 7, duration_s: float = 30.0
) -> None:
    reader.request(Acquire(NAMESPACE, tuple(keys), LEASE, duration_s, wait_s), request_id)


async def answers(reader: RawPeer) -> tuple[AcquireAnswer, ...]:
    body = (await reader.reply()).body
    assert isinstance(body, Acquired)
    return body.answers


def leased(node: ControlNode) -> int:
    return node.store.snapshot().leases


async def parked(node: ControlNode, number: int = 1) -> None:
    await wait_until_async(lambda: node.server.stats.parked == number)


async def test_it_completes_on_commits(node, writer, reader) -> None:
    granted = await reserved(writer)
    park(reader)
    await parked(node)
    await commit(writer, granted[:2])
    await commit(writer, granted[3:])
    assert node.server.stats.parked == 1, "one key is still being written"
    await commit(writer, granted[2:3])
    assert all(isinstance(answer, Resident) for answer in await answers(reader))
    await parked(node, 0)
    assert node.store.snapshot().watched_keys == 0


async def test_it_waits_for_keys_that_nobody_has_reserved_yet(node, writer, reader) -> None:
    park(reader)
    await parked(node)
    await commit(writer, await reserved(writer))
    assert len(await answers(reader)) == len(KEYS)


async def test_it_ends_when_the_writer_gives_up(node, writer, reader) -> None:
    granted = await reserved(writer)
    await commit(writer, granted[:1])
    park(reader)
    await parked(node)
    await writer.ask(
        Abort(NAMESPACE, tuple((item.key, item.generation) for item in granted[1:2]), quiet=True)
    )
    first, second = await answers(reader)
    assert isinstance(first, Resident)
    assert second == Miss(MissReason.NEVER_STORED)


async def test_it_ends_when_the_reservation_runs_out(node, writer, reader) -> None:
    await reserved(writer, duration_s=0.05)
    park(reader)
    await parked(node)

    def ticked() -> bool:
        node.store.tick()
        return node.server.stats.parked == 0

    await wait_until_async(ticked)
    assert await answers(reader) == (Miss(MissReason.EXPIRED),)


async def test_it_ends_when_its_time_is_over(node, writer, reader) -> None:
    """Mutant: say Filling, and the reader asks again for ever."""
    granted = await reserved(writer)
    await commit(writer, granted[:1])
    park(reader, wait_s=0.05)
    first, second = await answers(reader)
    assert isinstance(first, Resident)
    assert second == Miss(MissReason.PENDING_TIMEOUT)
    assert node.store.snapshot().watched_keys == 0


async def test_without_a_wait_filling_is_an_answer(node, writer, reader) -> None:
    await reserved(writer)
    park(reader, wait_s=0.0)
    assert await answers(reader) == (Filling(),)
    assert node.server.stats.parked_total == 0


async def test_what_was_dropped_and_is_pushed_again_is_waited_for(node, writer, reader) -> None:
    """A prompt that was here before: prefill computes it again. Mutant: only what was never seen is waited for."""
    await commit(writer, await reserved(writer))
    node.store.drop(ClientId(b"d" * 16), Drop(NAMESPACE, (KEYS[0],)))
    park(reader)
    await parked(node)
    await commit(writer, await reserved(writer))
    assert isinstance((await answers(reader))[0], Resident)


async def test_what_cannot_come_is_not_waited_for(node, writer, reader) -> None:
    await commit(writer, await reserved(writer))
    node.store.settle(  # as if it had not verified
        node.store.check(*_suspect(node)), sound=False
    )
    park(reader)
    assert await answers(reader) == (Miss(MissReason.BAD_COPY),)
    assert node.server.stats.parked_total == 0


def _suspect(node: ControlNode):
    client = ClientId(b"d" * 16)
    (answer,) = node.store.acquire(client, Acquire(NAMESPACE, (KEYS[0],), LeaseId(b"d" * 16), 5.0))
    assert isinstance(answer, Resident)
    return client, Suspect(NAMESPACE, KEYS[0], answer.generation, LeaseId(b"d" * 16))


async def test_a_release_ends_the_wait_and_takes_nothing_again(node, writer, reader) -> None:
    """The reader was cancelled: its Release overtakes the commit. Mutant: the parked Acquire leases after it."""
    granted = await reserved(writer)
    await commit(writer, granted[:1])
    park(reader)
    await parked(node)
    assert leased(node) == 1, "what is there is leased during the wait"
    reader.request(Release(LEASE), request_id=8)
    bodies = {reply.request_id: reply.body for reply in (await reader.reply(), await reader.reply())}
    assert bodies == {7: Acquired((Miss(MissReason.EXPIRED),)), 8: Done()}
    await commit(writer, granted[1:])
    assert leased(node) == 0
    assert node.store.snapshot().watched_keys == 0


@pytest.fixture
def in_one_turn(node, monkeypatch) -> Callable[..., Coroutine[None, None, dict[int, ReplyBody]]]:
    """Has the node receive some requests in one turn of its loop; the replies by position."""
    sent: dict[int, ReplyBody] = {}

    def send(_: bytes, frame: bytes) -> bool:
        reply = decode_reply(frame)
        sent[reply.request_id] = reply.body
        return True

    async def replies(*bodies: RequestBody) -> dict[int, ReplyBody]:
        monkeypatch.setattr(node.server._endpoint, "send", send)
        for number, body in enumerate(bodies):
            sender = READER if isinstance(body, Acquire | Release) else WRITER
            node.server._receive(b"peer", encode(Request(1, ClientId(sender), number, body)))
        await wait_until_async(lambda: len(sent) == len(bodies))
        assert node.server.stats.parked == 0 and node.server.stats.parked_total == 1
        return sent

    return replies


async def test_a_release_that_comes_with_its_acquire_leaves_no_request_without_an_answer(
    node, reader, writer, in_one_turn
) -> None:
    """Mutant: answer from within the wait, which has not begun."""
    await reserved(writer)
    replies = await in_one_turn(WAITING, Release(LEASE))
    assert replies == {0: Acquired((Miss(MissReason.EXPIRED),)), 1: Done()}


async def test_a_commit_that_comes_with_an_acquire_is_not_waited_for(node, writer, in_one_turn) -> None:
    """Mutant: look before the wait has begun, and watch the keys from then on."""
    granted = await reserved(writer)
    replies = await in_one_turn(WAITING, Commit(NAMESPACE, tuple(granted)))
    assert [type(answer) for answer in replies[0].answers] == [Resident] * len(KEYS)


async def test_a_writer_that_gives_up_as_the_acquire_comes_is_not_waited_for(
    node, writer, in_one_turn
) -> None:
    given_up = tuple((item.key, item.generation) for item in await reserved(writer))
    replies = await in_one_turn(WAITING, Abort(NAMESPACE, given_up, quiet=True))
    assert replies[0] == Acquired((Miss(MissReason.NEVER_STORED),))


async def test_another_clients_release_of_the_same_lease_id_changes_nothing(node, writer, reader) -> None:
    granted = await reserved(writer)
    park(reader)
    await parked(node)
    assert (await writer.ask(Release(LEASE))).body == Done()
    await commit(writer, granted)
    assert len(await answers(reader)) == len(KEYS)


async def test_a_client_can_park_only_so_many(node, writer, reader, monkeypatch) -> None:
    """The one too many is answered at once; another client still may. Mutant: one bound for all clients."""
    monkeypatch.setattr(limits, "PARKED_PER_CLIENT_MAX", 3)
    await reserved(writer)
    for request_id in range(3):
        park(reader, request_id=request_id)
    await parked(node, 3)
    park(reader, request_id=99)
    reply = await reader.reply()
    assert (reply.request_id, reply.body) == (99, Acquired((Filling(),)))
    assert node.server.stats.not_parked == 1
    with raw_peer(node.address, client=b"o" * 16) as other:
        park(other)
        await parked(node, 4)


async def test_a_stopping_node_answers_what_it_has_parked(writer, reader, node) -> None:
    """Mutant: close the socket first."""
    await reserved(writer)
    park(reader)
    await parked(node)
    await node.server.stop()
    assert await answers(reader) == (Filling(),)


async def test_a_wait_longer_than_allowed_is_cut(node, writer, reader, monkeypatch) -> None:
    monkeypatch.setattr(limits, "WAIT_S_MAX", 0.05)
    await reserved(writer)
    park(reader, wait_s=1000.0)
    assert await answers(reader) == (Miss(MissReason.PENDING_TIMEOUT),)


async def test_a_clock_that_stands_still_prolongs_the_wait_but_does_not_spin() -> None:
    """The node was stopped: its clock advances little, the timers fire at once; each time it waits again."""
    now = 100.0
    async with running(ControlNode(clock=lambda: now)) as node:
        with raw_peer(node.address) as peer:
            assert isinstance((await peer.ask(Hello(NAMESPACE, MANIFEST.encode()))).body, Welcome)
            park(peer, wait_s=0.02)
            await parked(node)
            with pytest.raises(AssertionError, match="a reply"):
                await peer.reply(0.2)
            now += 0.02
            assert await answers(peer) == (Miss(MissReason.NEVER_STORED),)
            await asyncio.sleep(0)
