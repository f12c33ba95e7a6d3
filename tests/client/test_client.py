"""The async client over real sockets: several nodes, an index that may be wrong or gone, nodes that die."""

import asyncio
import random
import time
from contextlib import AsyncExitStack

import pytest

from kvstore.client import (
    Client,
    ClientConfig,
    Committed,
    Exists,
    Granted,
    NodeId,
    Refused,
    ReportItem,
    Resident,
    Stale,
)
from kvstore.client.breaker import BreakerState
from kvstore.core import BadConfiguration, BadRequest, IndexDown, MissReason, Namespace, Tier, limits
from kvstore.index import InProcessIndex, NodeRecord, RedisIndex
from kvstore.stream import FrameStream
from kvstore.transfer import InProcessNetwork
from tests.support import free_port, wait_until_async
from tests.support.control_node import (
    MANIFEST,
    NAMESPACE,
    OBJECT_BYTES,
    TABLE,
    ControlNode,
    chain,
    eventually,
    items,
    running,
)

KEYS = chain(6)


class FlakyIndex(InProcessIndex):
    """An index that can be down; counts the questions it was asked meanwhile."""

    down = False
    refused = 0

    async def lookup(self, keys):
        self._fail_if_down()
        return await super().lookup(keys)

    async def holders(self, keys):
        self._fail_if_down()
        return await super().holders(keys)

    async def nodes(self):
        self._fail_if_down()
        return await super().nodes()

    def _fail_if_down(self) -> None:
        if self.down:
            self.refused += 1
            raise IndexDown("down, as planned")


@pytest.fixture
def index() -> FlakyIndex:
    return FlakyIndex(time.monotonic)


@pytest.fixture
async def stack():
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def nodes(stack, index):
    """Three nodes; the first is the preferred one."""
    network = InProcessNetwork()
    nodes = [ControlNode(network, name=b"node-%03d" % number) for number in range(3)]
    for node in nodes:
        await stack.enter_async_context(running(node))
        await node.publish(index)
    return nodes


@pytest.fixture
async def client(stack, nodes, index):
    client = await stack.enter_async_context(Client(config(nodes[0]), index=index, rng=random.Random(1)))
    await client.open(MANIFEST)
    return client


def config(node: ControlNode, **more: object) -> ClientConfig:
    settings = {"request_timeout_s": 5.0, "probe_s": 0.05, "probe_s_max": 0.05, **more}
    return ClientConfig(node=node.address, **settings)  # type: ignore[arg-type]


async def store(node: ControlNode, keys, index=None) -> None:
    """Puts objects on one node, by a client of its own."""
    async with Client(config(node)) as writer:
        await writer.open(MANIFEST)
        wanted = [item for item in items(KEYS) if item.key in set(keys)]
        grants = await writer.reserve(NAMESPACE, wanted, 30.0)
        answers = await writer.commit(NAMESPACE, [(grant, TABLE) for grant in grants.granted])
        assert answers == (Committed(),) * len(keys)
    if index is not None:
        await node.publish(index)


def places(promise) -> list[bytes]:
    """The node of each promised copy."""
    return [copy.address.node for copy in promise.copies]


def leases(*nodes: ControlNode) -> list[int]:
    return [node.store.snapshot().leases for node in nodes]


def leased_pages(node: ControlNode) -> int:
    return node.store.snapshot().tiers[Tier.DRAM].leased_pages


async def test_what_one_client_commits_another_finds_leases_and_releases(nodes, index, client) -> None:
    await store(nodes[0], KEYS, index)
    found = await client.lookup(NAMESPACE, KEYS)
    assert (found.num_keys, found.nodes, found.reason) == (6, (nodes[0].node,), None)
    assert leases(nodes[0]) == [0], "a lookup is no lease"
    before = time.monotonic()
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert [copy.key for copy in promise.copies] == KEYS
    assert promise.reason is None
    assert before + 10.0 <= promise.expires_at <= time.monotonic() + 10.0
    first = promise.copies[0]
    assert first.address.boot == nodes[0].boot
    assert first.address.arena_base == nodes[0].arena.address
    assert isinstance(first.answer, Resident)
    assert first.answer.size_bytes == OBJECT_BYTES
    assert await client.renew(promise, 20.0) > 19.0
    await client.release(promise, KEYS[4:])
    assert leased_pages(nodes[0]) == 4 * 2
    await client.release(promise)
    assert leases(nodes[0]) == [0]
    assert await client.renew(promise, 20.0) == 0.0


async def test_a_chain_over_two_nodes_takes_one_acquire_at_each(nodes, index, client) -> None:
    """Mutants: one Acquire per key; all keys to every node."""
    await store(nodes[0], KEYS[:2], index)
    await store(nodes[1], KEYS[2:5], index)
    asked = [node.server.stats.requests.get("Acquire", 0) for node in nodes]
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert places(promise) == [nodes[0].node] * 2 + [nodes[1].node] * 3
    assert promise.reason is MissReason.NEVER_STORED
    assert [
        node.server.stats.requests.get("Acquire", 0) - n for node, n in zip(nodes, asked, strict=True)
    ] == [
        1,
        1,
        0,
    ]
    assert leases(*nodes) == [1, 1, 0]
    await client.release(promise)
    assert leases(*nodes) == [0, 0, 0]


async def test_the_preferred_node_is_used_where_both_hold_a_key(nodes, index, client) -> None:
    await store(nodes[1], KEYS, index)
    await store(nodes[0], KEYS[1:3], index)
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    one, two = nodes[0].node, nodes[1].node
    assert places(promise) == [two, one, one, two, two, two]


async def test_a_surplus_behind_a_gap_is_given_back(nodes, index, client) -> None:
    """The index believes in a key that its node has lost. Mutant: keep the leases after the cut."""
    await store(nodes[1], KEYS[:2], index)
    await store(nodes[0], KEYS[3:], index)
    await index.merge(nodes[1].node, {KEYS[2]: Tier.DRAM})
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert places(promise) == [nodes[1].node] * 2
    assert promise.reason is MissReason.NEVER_STORED
    await wait_until_async(lambda: leases(*nodes) == [0, 1, 0])


async def test_another_holder_is_asked_for_what_the_first_has_lost(nodes, index, client) -> None:
    await store(nodes[1], KEYS, index)
    await store(nodes[2], KEYS[:3], index)
    for key in KEYS[3:]:
        await index.merge(nodes[2].node, {key: Tier.DRAM})
    await index.merge(nodes[1].node, {KEYS[3]: None})  # node 2 now seems to hold more in a row
    await index.merge(nodes[1].node, {KEYS[3]: Tier.DRAM})
    await client._directory.refresh()
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert [copy.key for copy in promise.copies] == KEYS
    assert set(places(promise)) <= {nodes[1].node, nodes[2].node}


async def test_the_preferred_node_is_asked_beyond_what_the_index_knows(nodes, index, client) -> None:
    """Its last commits are not published yet."""
    await store(nodes[0], KEYS)
    assert (await client.lookup(NAMESPACE, KEYS)).num_keys == 0
    assert len(await client.acquire(NAMESPACE, KEYS, 10.0)) == 6


async def test_a_hand_off_finds_what_no_index_knows(nodes, client) -> None:
    await store(nodes[2], KEYS)
    assert len(await client.acquire(NAMESPACE, KEYS, 10.0)) == 0
    by_id = await client.acquire(NAMESPACE, KEYS, 10.0, first=[nodes[2].node])
    assert places(by_id) == [nodes[2].node] * 6
    by_address = await client.acquire(NAMESPACE, KEYS, 10.0, first=[by_id.copies[0].address])
    assert places(by_address) == [nodes[2].node] * 6


async def test_a_hand_off_waits_for_commits_under_way(nodes, client) -> None:
    async with Client(config(nodes[2])) as writer:
        await writer.open(MANIFEST)
        grants = await writer.reserve(NAMESPACE, items(KEYS), 30.0)
        waiting = asyncio.create_task(
            client.acquire(NAMESPACE, KEYS, 10.0, wait_s=20.0, first=[nodes[2].node])
        )
        await wait_until_async(lambda: nodes[2].server.stats.parked == 1)
        await writer.commit(NAMESPACE, [(grant, TABLE) for grant in grants.granted])
        assert len(await waiting) == 6


async def test_a_cancelled_wait_leaves_no_lease(nodes, client) -> None:
    """Mutant: release only what was answered."""
    await store(nodes[2], KEYS[:3])
    waiting = asyncio.create_task(client.acquire(NAMESPACE, KEYS, 60.0, wait_s=20.0, first=[nodes[2].node]))
    await wait_until_async(lambda: nodes[2].server.stats.parked == 1)
    assert leases(nodes[2]) == [1]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await wait_until_async(lambda: leases(nodes[2]) == [0] and nodes[2].server.stats.parked == 0)


async def test_without_an_index_the_preferred_node_and_the_last_useful_ones_are_asked(
    nodes, index, client
) -> None:
    """Mutant: an index that is down means no hits."""
    await store(nodes[1], KEYS[:3], index)
    await client.release(await client.acquire(NAMESPACE, KEYS[:3], 10.0))
    index.down = True
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert places(promise) == [nodes[1].node] * 3
    assert promise.reason is MissReason.INDEX_DOWN
    assert (await client.lookup(NAMESPACE, KEYS)).reason is MissReason.INDEX_DOWN
    assert await client.present(NAMESPACE, KEYS) is None
    assert index.refused > 0


async def test_of_keys_that_are_no_chain_each_is_present_or_not(nodes, index, client) -> None:
    await store(nodes[0], KEYS[:2], index)
    await store(nodes[1], KEYS[4:5], index)
    assert await client.present(NAMESPACE, KEYS) == [True, True, False, False, True, False]


async def test_an_index_in_trouble_is_left_alone_until_a_probe_succeeds(nodes, index, client) -> None:
    index.down = True
    for _ in range(10):
        await client.lookup(NAMESPACE, KEYS)
    assert index.refused == 3, "the breaker did not open"
    assert not client.stats.index_reachable
    assert client.stats.index_breaker_opened == 1
    index.down = False
    await store(nodes[0], KEYS[:1], index)

    async def found() -> bool:
        await client._directory.refresh()
        return (await client.lookup(NAMESPACE, KEYS)).num_keys == 1

    await eventually(found)
    assert client.stats.index_reachable


async def test_dead_nodes_are_not_believed_in(nodes, index, client) -> None:
    await store(nodes[1], KEYS, index)
    await index.leave(nodes[1].node)
    await client._directory.refresh()
    assert (await client.lookup(NAMESPACE, KEYS)).num_keys == 0


async def test_a_node_that_dies_costs_one_time_out_and_then_nothing(nodes, index, client) -> None:
    """Its breaker opens (counted), answers come at once, and when it is back it is used again."""
    await store(nodes[0], KEYS, index)
    assert len(await client.acquire(NAMESPACE, KEYS, 10.0)) == 6
    await nodes[0].die()
    reasons = [(await client.acquire(NAMESPACE, KEYS, 10.0)).reason for _ in range(5)]
    assert reasons[0] is MissReason.NODE_DOWN
    assert reasons[-1] is MissReason.BREAKER_OPEN
    assert client.stats.breakers_opened == 1
    assert client.stats.nodes_in_trouble == 1
    await nodes[0].start()
    await store(nodes[0], KEYS[:2])

    async def hit() -> bool:
        return len(await client.acquire(NAMESPACE, KEYS, 10.0)) == 2

    await eventually(hit)
    assert client.stats.nodes_in_trouble == 0
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert promise.copies[0].address.boot == nodes[0].boot


async def test_a_client_starts_without_any_node_and_finds_it_later(stack, index) -> None:
    node = ControlNode(listen=f"127.0.0.1:{free_port()}")
    client = await stack.enter_async_context(Client(config(node, request_timeout_s=0.2), index=index))
    assert await client.open(MANIFEST) == NAMESPACE
    assert client.welcome is None
    assert (await client.acquire(NAMESPACE, KEYS, 10.0)).reason is MissReason.NODE_DOWN
    grants = await client.reserve(NAMESPACE, items(KEYS), 5.0)
    assert {type(grant.answer) for grant in grants.grants} == {Refused}
    await stack.enter_async_context(running(node))

    async def granted() -> bool:
        return len((await client.reserve(NAMESPACE, items(KEYS), 5.0)).granted) == 6

    await eventually(granted)


async def test_what_the_preferred_node_refuses_goes_to_the_one_with_most_room(nodes, index, client) -> None:
    """The first node's reservable share is used up by somebody else."""
    await store(nodes[1], KEYS, index)  # so node 3 has more free bytes
    for node in nodes:
        await node.publish(index)
    await client._directory.refresh()
    async with Client(config(nodes[0])) as other:
        await other.open(MANIFEST)
        taken = await other.reserve(NAMESPACE, items(chain(100, seed=7)), 30.0)
        assert any(isinstance(grant.answer, Refused) for grant in taken.grants), "the node is not full"
        grants = await client.reserve(NAMESPACE, items(chain(40, seed=8)), 30.0)
    by_node = {grant.address.node for grant in grants.granted if grant.address}
    assert by_node == {nodes[0].node, nodes[2].node}
    answers = await client.commit(NAMESPACE, [(grant, TABLE) for grant in grants.granted])
    assert set(answers) == {Committed()}


async def test_placement_goes_on_without_the_preferred_node(nodes, client) -> None:
    await nodes[0].die()
    grants = await client.reserve(NAMESPACE, items(KEYS), 30.0)
    assert {grant.address.node for grant in grants.grants if grant.address} <= {n.node for n in nodes[1:]}
    assert len(grants.granted) == 6
    await client.abort(NAMESPACE, grants.grants, quiet=True)
    assert sum(node.store.snapshot().reservations for node in nodes[1:]) == 0
    await nodes[0].start()


async def test_existing_objects_are_not_placed_again(nodes, index, client) -> None:
    await store(nodes[0], KEYS, index)
    grants = await client.reserve(NAMESPACE, items(KEYS), 30.0)
    assert [grant.answer for grant in grants.grants] == [Exists()] * 6
    assert nodes[1].server.stats.requests.get("Reserve") is None


async def test_a_grant_of_an_earlier_boot_cannot_be_committed(nodes, client) -> None:
    """Mutant: commit to whoever answers at that address."""
    grants = await client.reserve(NAMESPACE, items(KEYS), 30.0)
    assert isinstance(grants.grants[0].answer, Granted)
    await nodes[0].die()
    await nodes[0].start()
    commits = [(grant, TABLE) for grant in grants.granted]
    assert await client.commit(NAMESPACE, commits) == (Stale(),) * 6
    assert list(nodes[0].store.keys()) == []


async def test_a_cancelled_reservation_is_given_back(nodes, client, monkeypatch) -> None:
    """Cancelled while the second node is asked: the first has granted already."""
    await nodes[0].die()
    nodes[0]._arena_bytes = 3 * OBJECT_BYTES
    await nodes[0].start()
    await client._peers.local.hello()
    for node in nodes[1:]:
        node.server._endpoint.stop_reading()
    reserving = asyncio.create_task(client.reserve(NAMESPACE, items(KEYS), 30.0))
    await wait_until_async(lambda: nodes[0].store.snapshot().reservations > 0)
    await asyncio.sleep(0)
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    await wait_until_async(lambda: nodes[0].store.snapshot().reservations == 0)


async def test_what_is_granted_in_the_turn_of_a_cancellation_is_given_back(
    nodes, client, monkeypatch
) -> None:
    """Mutant: the reply is told while the caller still counts as one who asks."""
    link = client._peers.local.control._link
    receive = link._receive

    def receive_and_cancel(frame: memoryview) -> None:
        receive(frame)
        reserving.cancel()

    monkeypatch.setattr(link, "_receive", receive_and_cancel)
    reserving = asyncio.create_task(client.reserve(NAMESPACE, items(KEYS), 30.0))
    with pytest.raises(asyncio.CancelledError):
        await reserving
    assert nodes[0].store.snapshot().reservations > 0
    await wait_until_async(lambda: nodes[0].store.snapshot().reservations == 0)


async def test_a_late_grant_is_not_taken_back_from_who_asked_again(nodes, client, monkeypatch) -> None:
    """The node answers both Reserves at once, with one generation. Mutant: abort whatever comes too late: its pages
    would be free at once, while they are written."""
    endpoint = nodes[0].server._endpoint
    send, held = endpoint.send, []

    def hold(peer: FrameStream, frame: bytes) -> bool:
        held.append((peer, frame))
        return True

    monkeypatch.setattr(endpoint, "send", hold)
    monkeypatch.setattr(client._peers, "others", list)
    patience_s, client._peers.local._timeout_s = client._peers.local._timeout_s, 0.05
    late = await client.reserve(NAMESPACE, items(KEYS), 30.0)
    assert not late.granted
    client._peers.local._timeout_s = patience_s
    asking = asyncio.create_task(client.reserve(NAMESPACE, items(KEYS), 30.0))
    await wait_until_async(lambda: len(held) == 2)
    monkeypatch.setattr(endpoint, "send", send)
    for peer, frame in held:
        send(peer, frame)
    grants = await asking
    answers = await client.commit(NAMESPACE, [(grant, TABLE) for grant in grants.granted])
    assert answers == (Committed(),) * 6
    assert "Abort" not in nodes[0].server.stats.requests


async def test_commit_is_said_again_when_its_reply_was_lost(nodes, client, monkeypatch) -> None:
    grants = await client.reserve(NAMESPACE, items(KEYS), 30.0)
    client._peers.local._timeout_s = 0.2
    send = nodes[0].server._endpoint.send
    lost: list[bytes] = []

    def lossy(peer: FrameStream, frame: bytes) -> bool:
        if not lost:
            lost.append(frame)
            return True
        return send(peer, frame)

    monkeypatch.setattr(nodes[0].server._endpoint, "send", lossy)
    answers = await client.commit(NAMESPACE, [(grant, TABLE) for grant in grants.granted])
    assert answers == (Committed(),) * 6
    assert len(lost) == 1
    assert nodes[0].server.stats.requests["Commit"] == 2


async def test_a_bad_copy_is_dropped_when_it_is_suspected(nodes, index, client) -> None:
    await store(nodes[0], KEYS, index)  # their tables are zeros, their bytes hash to something else
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert await client.suspect(NAMESPACE, promise.copies[0])
    assert (await client.acquire(NAMESPACE, KEYS, 10.0)).reason is MissReason.BAD_COPY


async def test_reports_drops_and_hints_reach_the_nodes(nodes, index, client) -> None:
    await store(nodes[0], KEYS, index)
    await store(nodes[1], KEYS, index)
    await client.report([ReportItem(f"request-{number}", 100, 50, 50) for number in range(300)])
    await wait_until_async(lambda: nodes[0].store.snapshot().totals.reports == 300)
    await index.merge(nodes[1].node, dict.fromkeys(KEYS, Tier.NVME))
    await index.merge(nodes[0].node, dict.fromkeys(KEYS))
    await client.prefetch(NAMESPACE, KEYS)
    assert [node.server.stats.requests.get("Prefetch", 0) for node in nodes] == [0, 1, 0]
    assert await client.drop(NAMESPACE, KEYS, [NodeId(b"not-here")]) == 0, "nobody else may be asked instead"
    assert await client.drop(NAMESPACE, KEYS) == 3
    assert [list(node.store.keys()) for node in nodes] == [[], [], []]


async def test_a_namespace_must_be_open(client) -> None:
    with pytest.raises(BadRequest, match="open"):
        await client.acquire(Namespace(b"n" * 32), KEYS, 1.0)


async def test_more_keys_than_a_message_holds(stack, index) -> None:
    """1,100 objects of one prompt: two batches of every call."""
    async with running(ControlNode(arena_bytes=160 << 20)) as node, Client(config(node)) as client:
        await client.open(MANIFEST)
        keys = chain(1100)
        grants = await client.reserve(NAMESPACE, items(keys), 30.0)
        assert len(grants.granted) == 1100
        assert set(await client.commit(NAMESPACE, [(grant, TABLE) for grant in grants.granted])) == {
            Committed()
        }
        promise = await client.acquire(NAMESPACE, keys, 10.0)
        assert len(promise) == 1100
        await client.release(promise, keys)
        assert leases(node) == [0]


async def test_the_index_is_found_through_the_node(stack, redis_server) -> None:
    """A real Redis, named in the node's Welcome only."""
    network = InProcessNetwork()
    nodes = [
        ControlNode(network, name=name, index_url=redis_server.url) for name in (b"redis--1", b"redis--2")
    ]
    writer_index = RedisIndex.connect(redis_server.url)
    for node in nodes:
        await stack.enter_async_context(running(node))
    await store(nodes[1], KEYS)
    for node in nodes:
        await node.publish(writer_index)
    client = await stack.enter_async_context(Client(config(nodes[0])))
    await client.open(MANIFEST)
    found = await client.lookup(NAMESPACE, KEYS)
    assert (found.num_keys, found.nodes) == (6, (nodes[1].node,))
    assert places(await client.acquire(NAMESPACE, KEYS, 10.0)) == [nodes[1].node] * 6
    await writer_index.close()


async def test_a_breaker_probe_is_not_paid_by_a_call(nodes, client) -> None:
    peer = client._peers.local
    for _ in range(3):
        peer.breaker.failure()
    asked = nodes[0].server.stats.requests.copy()
    await wait_until_async(lambda: not peer.breaker.closed)
    assert (await client.acquire(NAMESPACE, KEYS, 1.0)).reason is MissReason.BREAKER_OPEN
    assert nodes[0].server.stats.requests == asked
    await wait_until_async(lambda: (peer.probe_if_due(), peer.breaker.state is BreakerState.CLOSED)[1])


@pytest.mark.parametrize(
    "control", ["no address", "*:7400", "a@b:7400", "h\u00e9:7400", "a;b:7400", "host:99999"]
)
async def test_a_node_with_an_impossible_address_in_the_index_is_left_out(
    nodes, index, client, caplog, control
) -> None:
    """Mutant: believe what nobody can connect to: every call of every client would raise."""
    await store(nodes[0], KEYS[:2], index)
    record = NodeRecord(node=NodeId(b"odd-node"), boot=nodes[0].boot, control=control)
    await index.heartbeat(record, 60.0)
    await index.merge(record.node, dict.fromkeys(KEYS, Tier.DRAM))
    for _ in range(3):
        await client._directory.refresh()
    assert len(await client.acquire(NAMESPACE, KEYS, 10.0)) == 2
    assert caplog.text.count(repr(control)) == 1


async def test_a_bug_in_the_chores_is_logged_and_they_go_on(stack, nodes, index, monkeypatch, caplog) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    client = await stack.enter_async_context(Client(config(nodes[0]), index=index))
    rounds = []

    async def broken() -> None:
        rounds.append(1)
        raise ZeroDivisionError

    monkeypatch.setattr(client._directory, "refresh", broken)
    await wait_until_async(lambda: len(rounds) > 2)
    assert "bug of the client" in caplog.text


async def test_an_index_that_cannot_be_used_costs_hits_elsewhere_only(stack, caplog) -> None:
    node = await stack.enter_async_context(running(ControlNode(index_url="mysql://nonsense")))
    client = await stack.enter_async_context(Client(config(node)))
    await client.open(MANIFEST)
    await store(node, KEYS)
    await client._directory.refresh()
    assert len([r for r in caplog.records if "mysql" in r.getMessage()]) == 2, (
        "one line of each of two clients"
    )
    promise = await client.acquire(NAMESPACE, KEYS, 10.0)
    assert len(promise) == 6
    unknown = await client.acquire(NAMESPACE, chain(1, seed=5), 10.0)
    assert unknown.reason is MissReason.NEVER_STORED, "there is no index that could be down"


@pytest.mark.parametrize("settings", [{"index_url": "mysql://nonsense"}, {"node": "7400"}])
async def test_what_the_user_wrote_wrongly_is_said_at_the_start(settings) -> None:
    client = Client(ClientConfig(**settings))
    with pytest.raises(BadConfiguration, match=r"mysql|7400"):
        await client.start()
    await client.close()
