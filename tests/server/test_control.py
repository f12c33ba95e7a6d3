"""The control endpoint over real sockets, with the real store."""

import socket
from dataclasses import replace

import msgspec
import pytest

from kvstore.core import BadConfiguration, Key, MissReason, Namespace, limits, seal
from kvstore.store import Steps
from kvstore.stream import LENGTH_BYTES
from kvstore.wire import (
    VERSIONS_SPOKEN,
    Acquire,
    Acquired,
    ClientId,
    Commit,
    CommitDone,
    CommitItem,
    Committed,
    Done,
    Drop,
    Exists,
    Failed,
    Generation,
    Granted,
    Hello,
    LeaseId,
    LeaseState,
    Miss,
    Pages,
    Prefetch,
    Release,
    Renew,
    Report,
    ReportItem,
    Request,
    RequestBody,
    Reserve,
    ReserveAnswer,
    Reserved,
    Resident,
    Suspect,
    Verdict,
    Welcome,
    encode,
)
from tests.server.raw import RawPeer, raw_peer
from tests.support import wait_until_async
from tests.support.control_node import (
    MANIFEST,
    NAMESPACE,
    OBJECT_BYTES,
    TABLE,
    ControlNode,
    chain,
    items,
    running,
)

LEASE, OTHER_LEASE = LeaseId(b"l" * 16), LeaseId(b"m" * 16)
UNKNOWN = Namespace(b"n" * 32)
KEY = Key(b"k" * 32)
UNREADABLE: list[RequestBody] = [
    Acquire(NAMESPACE, (Key(b"short"),), LEASE, 1.0),
    Acquire(NAMESPACE, (KEY,) * (limits.BATCH_KEYS_MAX + 1), LEASE, 1.0),
    Acquire(NAMESPACE, (KEY,), LEASE, float("nan")),
    Renew(LEASE, -1.0),
]
HELLO = Hello(NAMESPACE, MANIFEST.encode())


async def stored(peer: RawPeer, keys) -> None:
    """Opens the namespace and commits objects under these keys."""
    assert isinstance((await peer.ask(HELLO)).body, Welcome)
    granted = (await peer.ask(Reserve(NAMESPACE, tuple(items(keys)), 30.0))).body
    assert isinstance(granted, Reserved)
    done = tuple(
        CommitItem(key, answer.generation, TABLE)
        for key, answer in zip(keys, granted.answers, strict=True)
        if isinstance(answer, Granted)
    )
    assert (await peer.ask(Commit(NAMESPACE, done))).body == CommitDone((Committed(),) * len(keys))


async def test_every_call_is_answered_by_its_kind() -> None:
    keys = chain(2)
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            await stored(peer, keys)
            answers = (await peer.ask(Acquire(NAMESPACE, tuple(keys), LEASE, 10.0))).body
            assert isinstance(answers, Acquired)
            resident = answers.answers[0]
            assert isinstance(resident, Resident)
            assert (resident.size_bytes, resident.table) == (OBJECT_BYTES, TABLE)
            assert (await peer.ask(Pages(LEASE, tuple(keys)))).body == answers
            sealed = Acquired(
                tuple(msgspec.structs.replace(one, table=seal(TABLE)) for one in answers.answers)
            )
            assert (await peer.ask(Pages(LEASE, tuple(keys), sealed=True))).body == sealed
            renewed = (await peer.ask(Renew(LEASE, 20.0))).body
            assert isinstance(renewed, LeaseState)
            assert 19.0 < renewed.remaining_s <= 20.0
            suspected = Suspect(NAMESPACE, keys[0], resident.generation, LEASE)
            assert (await peer.ask(suspected)).body == Verdict(bad=True)  # its table is zeros
            gone = (await peer.ask(Acquire(NAMESPACE, (keys[0],), OTHER_LEASE, 10.0))).body
            assert gone == Acquired((Miss(MissReason.BAD_COPY),))
            assert (await peer.ask(Release(LEASE))).body == Done()
            assert (await peer.ask(Renew(LEASE, 20.0))).body == LeaseState(0.0)
            assert (await peer.ask(Prefetch(NAMESPACE, tuple(keys)))).body == Done()
            assert (await peer.ask(Report((ReportItem("r", 32, 16, 16),)))).body == Done()
            again = (await peer.ask(Reserve(NAMESPACE, (items(keys)[1],), 5.0))).body
            assert again == Reserved((Exists(),))
            assert (await peer.ask(Drop(NAMESPACE, tuple(keys)))).body == Done()
            dropped = (await peer.ask(Acquire(NAMESPACE, (keys[1],), LEASE, 10.0))).body
            assert dropped == Acquired((Miss(MissReason.EVICTED),))
        assert node.server.stats.failures == {}
        assert node.server.stats.requests["Acquire"] == 3


async def test_hello_gives_the_facts_and_the_bounds() -> None:
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            reply = await peer.ask(Hello(), request_id=77)
    assert (reply.request_id, reply.boot) == (77, node.boot)
    welcome = reply.body
    assert isinstance(welcome, Welcome)
    assert (welcome.node, welcome.versions) == (node.node, VERSIONS_SPOKEN)
    assert (welcome.batch_keys_max, welcome.lease_s_max) == (limits.BATCH_KEYS_MAX, limits.LEASE_S_MAX)
    assert welcome.advice == ""


async def test_an_arena_too_small_for_a_model_says_so_once_in_the_log(caplog) -> None:
    async with running(ControlNode(arena_bytes=4 * OBJECT_BYTES)) as node:
        with raw_peer(node.address) as peer:
            for _ in range(2):
                welcome = (await peer.ask(HELLO)).body
                assert isinstance(welcome, Welcome)
                assert "MiB" in welcome.advice
    assert len([record for record in caplog.records if "MiB" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(NAMESPACE, b"{}"), "bad_request"),
        (Hello(b"n" * 32, MANIFEST.encode()), "bad_request"),
        (Acquire(UNKNOWN, (KEY,), LEASE, 1.0), "namespace_unknown"),
        (Reserve(NAMESPACE, tuple(items(chain(1))), 1.0), "namespace_unknown"),
    ],
)
async def test_what_cannot_be_done_fails_with_its_code(hello, code) -> None:
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            failed = (await peer.ask(hello)).body
        assert isinstance(failed, Failed)
        assert failed.code == code
        assert node.server.stats.failures == {code: 1}


@pytest.mark.parametrize("token", [b"", b"wrong", b"secret "])
async def test_without_the_token_nothing_is_done(token) -> None:
    """Mutant: compare only when the client sends a token."""
    async with running(ControlNode(token=b"secret")) as node:
        with raw_peer(node.address, token=token) as peer:
            failed = (await peer.ask(HELLO)).body
            assert isinstance(failed, Failed)
            assert failed.code == "not_authorised"
        with raw_peer(node.address, token=b"secret") as peer:
            assert isinstance((await peer.ask(Hello())).body, Welcome)
            unknown = (await peer.ask(Acquire(NAMESPACE, tuple(chain(1)), LEASE, 1.0))).body
            assert isinstance(unknown, Failed)
            assert unknown.code == "namespace_unknown", "the refused Hello opened the namespace"


async def test_a_node_without_a_token_serves_clients_that_have_one() -> None:
    async with running(ControlNode()) as node:
        with raw_peer(node.address, token=b"secret") as peer:
            assert isinstance((await peer.ask(Hello())).body, Welcome)


@pytest.mark.parametrize("frame", [[2, b"c" * 16, 5, ["Greeting"], b""], [9, b"", 5]])
async def test_a_version_that_is_not_spoken_is_refused_even_if_nothing_else_can_be_read(frame) -> None:
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            peer.send(msgspec.msgpack.encode(frame))
            reply = await peer.reply()
    assert reply.request_id == 5
    assert isinstance(reply.body, Failed)
    assert reply.body.code == "version"
    assert "speaks version 1" in reply.body.message


async def test_a_known_request_of_another_version_is_refused_too() -> None:
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            reply = await peer.ask(Hello(), version=2)
    assert isinstance(reply.body, Failed)
    assert reply.body.code == "version"


async def test_an_unreadable_request_with_a_readable_envelope_is_answered() -> None:
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            for request_id, body in enumerate(UNREADABLE):
                reply = await peer.ask(body, request_id)
                assert isinstance(reply.body, Failed)
                assert (reply.request_id, reply.body.code) == (request_id, "bad_request")
        assert node.server.stats.garbage_frames == 0
        assert node.server.stats.failures == {"bad_request": len(UNREADABLE)}


async def test_garbage_is_dropped_and_counted_and_the_client_goes_on() -> None:
    truncated = encode(Request(1, ClientId(b"c" * 16), 42, HELLO, b""))[:-40]
    garbage = [b"", b"\xc1", b"hello", b"\xff" * 1000, b"\x95" * 64, truncated]
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            for frame in garbage:
                peer.send(frame)
            assert isinstance((await peer.ask(Hello())).body, Welcome)
        assert node.server.stats.garbage_frames == len(garbage)


async def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else() -> None:
    """Mutant: bytes are taken until a frame of any announced length is whole."""
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as bad, raw_peer(node.address, client=b"d" * 16) as good:
            assert isinstance((await bad.ask(Hello())).body, Welcome)
            bad.send_bytes((limits.FRAME_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "little"))
            await bad.end()
            assert isinstance((await good.ask(Hello())).body, Welcome)
        assert node.server.stats.garbage_frames == 1


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", b"kvstore\x02"])
async def test_who_speaks_something_else_is_sent_away_at_once(said) -> None:
    """A browser; a client of ZeroMQ; a release to come. Mutant: the preamble is not compared."""
    async with running(ControlNode()) as node:
        with raw_peer(node.address, preamble=said) as peer:
            await peer.end()
        assert node.server.stats.garbage_frames == 1


async def test_a_reply_that_would_be_too_large_is_refused_instead(monkeypatch) -> None:
    async with running(ControlNode()) as node:
        with raw_peer(node.address) as peer:
            await peer.ask(Renew(LEASE, 1.0))
            monkeypatch.setattr(limits, "FRAME_BYTES_MAX", 60)  # a Hello is smaller, a Welcome is not
            failed = (await peer.ask(Hello())).body
        assert node.server.stats.failures == {"too_large": 1}
    assert isinstance(failed, Failed)
    assert failed.code == "too_large"


async def test_a_bug_in_one_request_is_answered_logged_and_counted(monkeypatch, caplog) -> None:
    async with running(ControlNode()) as node:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(node.store, "prefetch", broken)
        with raw_peer(node.address) as peer:
            failed = (await peer.ask(Prefetch(NAMESPACE, ()))).body
            assert isinstance(failed, Failed)
            assert failed.code == "internal"
            assert isinstance((await peer.ask(Hello())).body, Welcome)
        assert node.server.stats.failures == {"internal": 1}
    assert any(record.exc_info for record in caplog.records)


async def test_a_bug_in_a_request_that_answers_later_is_answered_too(monkeypatch) -> None:
    async with running(ControlNode()) as node:

        async def broken(*_: object) -> bool:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(node.mover, "suspect", broken)
        with raw_peer(node.address) as peer:
            failed = (await peer.ask(Suspect(NAMESPACE, KEY, Generation(b"g" * 8), LEASE))).body
        assert isinstance(failed, Failed)
        assert failed.code == "internal"
        await wait_until_async(lambda: node.server.stats.parked == 0)


async def test_a_bug_in_a_later_slice_is_answered_and_the_request_counts_once(monkeypatch) -> None:
    """Mutant: a request counts once for each slice."""
    async with running(ControlNode()) as node:

        def broken(*_: object) -> Steps[tuple[ReserveAnswer, ...]]:
            yield
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(node.store, "reserving", broken)
        with raw_peer(node.address) as peer:
            failed = (await peer.ask(Reserve(NAMESPACE, tuple(items(chain(2))), 30.0))).body
        assert isinstance(failed, Failed)
        assert failed.code == "internal"
        assert node.server.stats.requests["Reserve"] == 1


async def test_a_batch_of_several_slices_is_answered_whole() -> None:
    async with running(ControlNode()) as node:
        keys = chain(3 * limits.RESERVED_PER_SLICE + 1)
        with raw_peer(node.address) as peer:
            await peer.ask(Hello(NAMESPACE, MANIFEST.encode()))
            answers = (await peer.ask(Reserve(NAMESPACE, tuple(items(keys)), 30.0))).body
        assert isinstance(answers, Reserved)
        assert len(answers.answers) == len(keys)
        assert sum(isinstance(answer, Granted) for answer in answers.answers) > limits.RESERVED_PER_SLICE


async def test_a_taken_port_names_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        node = ControlNode(listen=address)
        with pytest.raises(BadConfiguration, match=r"taken by process \d+ \(.*pytest"):
            await node.start()
        node.mover.close()
        node.transfer.close()
        node.arena.close()


@pytest.mark.parametrize("listen", ["7400", "127.0.0.1:http", "no.such.host.invalid:0", "192.0.2.1:0"])
async def test_an_address_that_cannot_be_bound_is_explained(listen) -> None:
    node = ControlNode(listen=listen)
    with pytest.raises(BadConfiguration, match=listen.split(":")[0]):
        await node.start()
    node.mover.close()
    node.transfer.close()
    node.arena.close()


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
async def test_it_listens_on_numbers_and_names(listen) -> None:
    async with running(ControlNode(listen=listen)) as node:
        assert not node.address.endswith(":0")
        with raw_peer(node.address) as peer:
            assert isinstance((await peer.ask(Hello())).body, Welcome)


async def test_the_port_is_free_again_after_the_end() -> None:
    node = ControlNode()
    async with running(node):
        address, boot = node.address, node.boot
    async with running(node):
        assert node.address == address
        assert node.boot != boot
        with raw_peer(node.address) as peer:
            assert (await peer.ask(Hello())).boot == node.boot


async def test_the_stats_are_frozen() -> None:
    async with running(ControlNode()) as node:
        before = node.server.stats
        with raw_peer(node.address) as peer:
            await peer.ask(Hello())
        assert before.requests == {}
        assert node.server.stats.requests == {"Hello": 1}
        assert node.server.stats.busy_s["Hello"] > 0
        with pytest.raises(AttributeError):
            before.parked = 1  # type: ignore[misc]
        assert replace(before, parked=3).parked == 3
