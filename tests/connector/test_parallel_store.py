"""Worker halves of every rank, the real mover and the real store: bytes read are bytes written, or nothing is read.

Mutants that were tried and are caught: pages that are free at once when their writer's time is up; a commit that
does not ask for the generation; a load that takes each rank's part from wherever it finds it.
"""

import ctypes
from collections.abc import Iterator
from itertools import permutations

import pytest

from connector.background import Background
from connector.control import Grant, ReserveAsk
from connector.metadata import LoadJob, LoadObject, SaveJob, SaveReport
from kvstore.client import ClientConfig, Mover, NodeAddress, Staging, open_mover
from kvstore.core import Extent, Extents, Key, Span, locate
from kvstore.policy import PrefixLru
from kvstore.store import Store
from kvstore.transfer import InProcessNetwork, InProcessTransfer
from kvstore.wire import (
    Acquire,
    BootId,
    Busy,
    ClientId,
    CommitItem,
    Committed,
    Granted,
    LeaseId,
    NodeId,
    ReserveItem,
    Resident,
    Stale,
)
from tests.connector.fleet import Fleet, Format, Lanes, Model, Split
from tests.connector.teams import Team, merged, team
from tests.support.node import running_node

PAGE_BYTES = 4096
PAGES = 400
RESERVED_S = 30.0
KEY = Key(b"k" * 32)
GQA, MLA = Model((Lanes(4, 8),) * 4), Model((Lanes(0, 24),) * 4)
OTHER = Model((Lanes(4, 8),) * 4, seed=2)  # the same prompt on other hardware: other bytes for the same key
ANN, BOB = ClientId(b"a" * 16), ClientId(b"b" * 16)


class Node:
    """A store and its arena."""

    def __init__(self, network: InProcessNetwork, name: str) -> None:
        self.now = 1000.0
        self.memory = ctypes.create_string_buffer(PAGES * PAGE_BYTES)
        base = ctypes.addressof(self.memory)
        transfer = InProcessTransfer(network, name)
        transfer.register(base, len(self.memory))
        self.address = NodeAddress(
            NodeId(name.encode().ljust(8)),
            BootId(b"boot0001"),
            "nowhere:1",
            {"in_process": name},
            base,
            PAGE_BYTES,
        )
        self.store = Store(PAGES, PAGE_BYTES, PrefixLru(), lambda: self.now)

    def reserve(self, who: ClientId, some: Team) -> Granted | Busy:
        """Asks for the right to write the team's chunk."""
        manifest = some.manifest
        self.store.open_namespace(manifest.namespace, manifest.encode())
        item = ReserveItem(KEY, Key(manifest.namespace), 0, some.size_bytes, cold=False)
        [answer] = self.store.reserve(who, manifest.namespace, [item], RESERVED_S)
        assert isinstance(answer, Granted | Busy)
        return answer

    def commit(self, who: ClientId, some: Team, granted: Granted, table: bytes) -> object:
        """Publishes the chunk."""
        item = CommitItem(KEY, granted.generation, table)
        [answer] = self.store.commit(who, some.manifest.namespace, [item])
        self.store.audit()
        return answer

    def acquire(self, some: Team) -> object:
        """Leases the chunk."""
        asked = Acquire(some.manifest.namespace, (KEY,), LeaseId(b"l" * 16), 30.0)
        [answer] = self.store.acquire(BOB, asked)
        return answer

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.store.tick()
        self.store.audit()

    def read(self, found: Resident) -> bytes:
        """The object's bytes as they lie in the arena."""
        placed = locate(extents_of(found), PAGE_BYTES, (Span(0, found.size_bytes),))
        return b"".join(self.memory.raw[offset : offset + size] for offset, size in placed)


def extents_of(answer: Granted | Resident) -> Extents:
    return tuple(Extent(*extent) for extent in answer.extents)


def granted_to(answer: Granted | Busy) -> Granted:
    assert isinstance(answer, Granted)
    return answer


def save_job(some: Team, node: Node, granted: Granted) -> SaveJob:
    return some.save_job(KEY, node.address, granted.generation, extents_of(granted))


def load_job(some: Team, node: NodeAddress, found: Resident) -> LoadJob:
    wanted = LoadObject(
        KEY, 0, found.generation, extents_of(found), found.size_bytes, found.table, tuple(some.fleet.table)
    )
    return LoadJob(1, "r", (node,), (wanted,), 20.0)


@pytest.fixture
def network() -> InProcessNetwork:
    return InProcessNetwork()


@pytest.fixture
def mover(network: InProcessNetwork) -> Mover:
    transfer = InProcessTransfer(network, "workers")
    return Mover(transfer, Staging(transfer, 4 << 20))


def writer_of(model: Model, split: Split, form: Format = Format()) -> Fleet:  # noqa: B008 - immutable
    fleet = Fleet(model, split, form)
    fleet.fill()
    return fleet


def reader_of(model: Model, split: Split, form: Format = Format()) -> Fleet:  # noqa: B008 - immutable
    fleet = Fleet(model, split, form)
    fleet.fill(noise=True)
    return fleet


# --- a sample of the matrix -----------------------------------------------------------------------------

SAMPLE = [
    (GQA, Split(1, 1), Format(), Split(2, 1), Format(block_tokens=128)),
    (GQA, Split(2, 1), Format(layout="LBNHC"), Split(1, 2), Format(block_tokens=32)),
    (GQA, Split(2, 2), Format(layout="BLHNC"), Split(4, 1), Format(layout="BHLNC")),
    (GQA, Split(8, 1), Format(layout="BLNHC"), Split(1, 4), Format(layout="LHBNC", block_tokens=32)),
    (GQA, Split(1, 4), Format("cpu", 32), Split(8, 1), Format("cpu", 32)),
    (MLA, Split(4, 1), Format(), Split(1, 2), Format(block_tokens=128)),
    (MLA, Split(2, 2), Format(block_tokens=32), Split(8, 1), Format(layout="LBNHC")),
]


@pytest.mark.parametrize(("model", "write", "write_form", "read", "read_form"), SAMPLE, ids=str)
def test_workers_of_any_split_feed_those_of_any_other(
    network, mover, model, write, write_form, read, read_form
) -> None:
    node = Node(network, "one")
    with (
        team(writer_of(model, write, write_form), mover) as writer,
        team(reader_of(model, read, read_form), mover) as reader,
    ):
        granted = granted_to(node.reserve(ANN, writer))
        before = network.writes
        table = writer.save(save_job(writer, node, granted))
        assert network.writes > before
        assert table is not None
        assert node.commit(ANN, writer, granted, table) == Committed()
        assert reader.manifest == writer.manifest
        found = node.acquire(reader)
        assert isinstance(found, Resident)
        assert node.read(found) == model.object
        reports = reader.load(load_job(reader, node.address, found))
    assert [report.valid for report in reports] == [1] * len(reports)
    assert reader.fleet.holds()
    replicas = max(1, read.tp // (model.total_heads or 1))
    assert sum(report.moved_bytes for report in reports) == len(model.object) * replicas


def test_ranks_read_and_verify_only_their_own_lanes(network, mover) -> None:
    """A bit flips in a lane of the second rank: the first one has its part, the second one reports."""
    node = Node(network, "one")
    with (
        team(writer_of(GQA, Split(1, 1)), mover) as writer,
        team(reader_of(GQA, Split(2, 1)), mover) as reader,
    ):
        granted = granted_to(node.reserve(ANN, writer))
        table = writer.save(save_job(writer, node, granted))
        assert table is not None
        node.commit(ANN, writer, granted, table)
        found = node.acquire(reader)
        assert isinstance(found, Resident)
        [(at, _)] = locate(extents_of(found), PAGE_BYTES, (Span(found.size_bytes - 1, 1),))
        node.memory[at] = bytes([node.memory.raw[at] ^ 1])
        first, second = reader.load(load_job(reader, node.address, found))
    assert (first.valid, first.suspect) == (1, None)
    assert (second.valid, second.suspect) == (0, 0)


# --- two writers of one key -----------------------------------------------------------------------------


@pytest.fixture
def two(mover) -> Iterator[tuple[Team, Team]]:
    with (
        team(writer_of(GQA, Split(2, 1)), mover) as ann,
        team(writer_of(OTHER, Split(2, 1)), mover) as bob,
    ):
        yield ann, bob


@pytest.mark.parametrize("order", sorted(set(permutations("AABB"))), ids="".join)
def test_two_writers_of_one_key_on_two_nodes_leave_two_whole_objects(network, mover, two, order) -> None:
    """Rank by rank in any order. A load takes an object from one node, one generation, for all ranks."""
    nodes = {"A": Node(network, "one"), "B": Node(network, "two")}
    teams, clients, models = dict(zip("AB", two, strict=True)), {"A": ANN, "B": BOB}, {"A": GQA, "B": OTHER}
    granted = {name: granted_to(nodes[name].reserve(clients[name], teams[name])) for name in "AB"}
    jobs = {name: save_job(teams[name], nodes[name], granted[name]) for name in "AB"}
    reports: dict[str, list[SaveReport]] = {name: [] for name in "AB"}
    for name in order:
        reports[name].append(teams[name].save_on(len(reports[name]), jobs[name]))
    for name in "AB":
        table = merged(reports[name])
        assert table is not None
        assert nodes[name].commit(clients[name], teams[name], granted[name], table) == Committed()
    for name in "AB":
        with team(reader_of(models[name], Split(4, 2)), mover) as reader:
            found = nodes[name].acquire(reader)
            assert isinstance(found, Resident)
            reports_of_ranks = reader.load(load_job(reader, nodes[name].address, found))
            assert {report.valid for report in reports_of_ranks} == {1}
            assert reader.fleet.holds()


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_a_writer_killed_between_its_ranks_leaves_nothing_and_the_other_one_completes(
    network, mover, two, late
) -> None:
    """`late`: the dead writer's second rank lands after the other one has written the same key."""
    node = Node(network, "one")
    ann, bob = two
    first = granted_to(node.reserve(ANN, ann))
    job = save_job(ann, node, first)
    ann.save_on(0, job)
    assert isinstance(node.reserve(BOB, bob), Busy)
    assert not isinstance(node.acquire(bob), Resident)
    node.after(RESERVED_S + 1.0)  # ann is dead
    second = granted_to(node.reserve(BOB, bob))
    table = merged([bob.save_on(rank, save_job(bob, node, second)) for rank in range(2)])
    assert table is not None
    if late:
        ann.save_on(1, job)
    assert node.commit(BOB, bob, second, table) == Committed()
    assert node.commit(ANN, ann, first, table) == Stale()
    with team(reader_of(OTHER, Split(1, 1)), mover) as reader:
        found = node.acquire(reader)
        assert isinstance(found, Resident)
        assert node.read(found) == OTHER.object
        [report] = reader.load(load_job(reader, node.address, found))
        assert report.valid == 1
        assert reader.fleet.holds()
    node.after(3600.0)
    assert node.store.snapshot().reservations == 0


# --- a real node, real bytes in motion ------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("transfer", ["mooncake", "shm"])
def test_workers_feed_each_other_through_a_real_node(transfer: str) -> None:
    """TP2 x PP2 and a token-major layout feed TP4 and TP1; MLA TP2 feeds PP2. Engines of one worker read by seals."""
    plays = [
        (GQA, Split(2, 2), Format(layout="LBNHC"), [Split(4, 1), Split(1, 1), Split(8, 1)]),
        (MLA, Split(2, 1), Format(), [Split(1, 2)]),
    ]
    with running_node() as node:
        mover = open_mover(node.control, transfer=transfer, staging_bytes=4 << 20)
        ranks, alone = (
            Background(ClientConfig(node=node.control, whole_objects=whole)) for whole in (False, True)
        )
        try:
            for model, write, form, readers in plays:
                with team(writer_of(model, write, form), mover) as writer:
                    key = push(ranks, writer)
                for read in readers:
                    with team(reader_of(model, read, Format(block_tokens=32)), mover) as reader:
                        pull(alone if read == Split(1, 1) else ranks, reader, key)
                        assert reader.fleet.holds()
        finally:
            ranks.close()
            alone.close()


def push(control: Background, some: Team) -> Key:
    """Stores the team's chunk; its key."""
    control.open(some.manifest)
    key = Key(some.manifest.namespace[::-1])
    ask = ReserveAsk(key, Key(some.manifest.namespace), 0, some.size_bytes, cold=False)
    [grant] = control.reserve([ask], 30.0).result(10)
    assert isinstance(grant, Grant)
    table = some.save(some.save_job(key, grant.node, grant.generation, grant.extents))
    assert table is not None
    assert control.commit([(grant, table)]).result(10) == [True]
    return key


def pull(control: Background, some: Team, key: Key) -> None:
    """Loads that chunk on all ranks."""
    control.open(some.manifest)
    promise = control.acquire([key], 30.0, 0.0, ()).result(10)
    [found] = promise.objects
    wanted = LoadObject(
        key, 0, found.generation, found.extents, found.size_bytes, found.table, tuple(some.fleet.table)
    )
    reports = some.load(LoadJob(1, "r", (found.node,), (wanted,), 20.0))
    assert {report.valid for report in reports} == {1}, reports
    control.release(promise)
