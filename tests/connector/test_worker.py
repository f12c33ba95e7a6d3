"""The worker half, hook by hook, with real tensors and a real mover over an in-process node.

Mutants that were tried and are caught: only the bad object's blocks reported, not those behind it; the deadline's
report without taking back the leave to write; a report while a scatter is under way; reports straight from the
threads instead of the step's snapshot; no report from a thread that raised; a save begun after its deadline; a
duplicate report when the deadline and the mover's answer meet; anything after shutdown; a save that ended between
two hooks of its step, begun again by the second.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.copies import HostCopies
from connector.metadata import Jobs, LoadObject, Shape
from connector.worker import GRACE_S, WorkerHalf
from kvstore.client import Mover, NodeAddress, PullItem, PullResult, PushItem, PushResult
from kvstore.core import MissReason, TransferFailed, checksums
from kvstore.transfer import Fault, Handle, Piece, Status
from tests.connector.caches import make_engine, mla_spec, vllm_config
from tests.connector.rig import PAGE_BYTES, Rig, other_engine
from tests.support import wait_until


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """The workers of a test end with it."""
    yield
    while Rig.alive:
        Rig.alive.pop().worker.shutdown()


def chain(rig: Rig, data: Sequence[bytes], node: Callable[[int], int] = lambda _: 0) -> list[LoadObject]:
    """Stored objects of two blocks each, to be loaded into blocks 11 and 12, 13 and 14, ..."""
    return [rig.stored(one, (11 + 2 * n, 12 + 2 * n), node(n)) for n, one in enumerate(data)]


def held(rig: Rig, data: Sequence[bytes]) -> list[bool]:
    """Which of these objects the engine holds where `chain` wants them."""
    return [rig.engine.bytes_of((11 + 2 * n, 12 + 2 * n)) == one for n, one in enumerate(data)]


def blocks_of(objects: Sequence[LoadObject]) -> set[int]:
    return {block for wanted in objects for block in wanted.blocks if block is not None}


class Gate:
    """Holds a thread up at a place until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(10)


# --- loads ----------------------------------------------------------------------------------------------


def test_a_load_fills_the_blocks_and_is_reported_once() -> None:
    rig = Rig()
    data = rig.random_objects(3)
    job = rig.load_job(chain(rig, data))
    seen = rig.run(job)
    assert held(rig, data) == [True] * 3
    assert (seen.finished, seen.failed, seen.sent, seen.invalid) == ({"r"}, set(), set(), set())
    report = rig.load_report()
    assert (report.valid, report.reason, report.suspect) == (3, None, None)
    assert report.moved_bytes == sum(len(one) for one in data)


def test_blocks_that_the_engine_has_are_not_touched() -> None:
    rig = Rig()
    [data] = rig.random_objects(1, num_blocks=4)
    before = rig.engine.bytes_of([12, 13])
    seen = rig.run(rig.load_job([rig.stored(data, (None, 11, None, 14))]))
    assert rig.engine.bytes_of([12, 13]) == before
    assert rig.geometry.units_of(len(data)) == 4
    assert rig.engine.bytes_of([11, 14]) == other_engine(seed=7).bytes_of([2, 4])
    assert seen.invalid == set()


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_corrupt_object_ends_the_prefix(bad: int) -> None:
    """Exactly the objects before it are valid; it and all behind it are reported and were not written."""
    rig = Rig()
    data = rig.random_objects(4)
    objects = chain(rig, data)
    rig.node["one"].flip(objects[bad].extents, len(data[bad]) // 2)
    before = rig.engine.bytes_of(sorted(blocks_of(objects[bad:])))
    seen = rig.run(rig.load_job(objects))
    assert held(rig, data) == [True] * bad + [False] * (4 - bad)
    assert rig.engine.bytes_of(sorted(blocks_of(objects[bad:]))) == before
    assert seen.invalid == blocks_of(objects[bad:])
    assert seen.finished == {"r"}
    report = rig.load_report()
    assert (report.valid, report.reason, report.suspect) == (bad, MissReason.BAD_COPY, bad)


def test_a_bit_that_flips_on_the_way_is_caught_as_well() -> None:
    rig = Rig()
    data = rig.random_objects(2)
    fault = rig.network.plan(Fault.FLIP, at_byte=5000, writes=False)
    rig.run(rig.load_job(chain(rig, data)))
    assert fault.hits == 1
    assert (rig.load_report().valid, rig.load_report().suspect) == (0, 0)


def test_a_block_that_the_engine_has_is_never_reported_as_bad() -> None:
    rig = Rig()
    [data] = rig.random_objects(1)
    wanted = rig.stored(data, (None, 11))
    rig.node["one"].flip(wanted.extents, 0)
    assert rig.run(rig.load_job([wanted])).invalid == {11}


@pytest.mark.parametrize("what", ["gone", "another boot", "another transport"])
def test_a_node_that_is_not_there_any_more_is_a_report(what: str) -> None:
    rig = Rig()
    data = rig.random_objects(2)
    job = rig.load_job(chain(rig, data))
    if what == "gone":
        rig.node["one"].transfer.close()
    elif what == "another boot":  # the new boot's arena lies elsewhere, so that old addresses are refused
        rig.node["one"].transfer.unregister(rig.node["one"].base)
    else:
        job = replace(job, nodes=tuple(replace_segments(node) for node in job.nodes))
    seen = rig.run(job)
    assert (rig.load_report().valid, rig.load_report().reason) == (0, MissReason.NODE_DOWN)
    assert seen.invalid == blocks_of(job.objects)
    assert held(rig, data) == [False, False]


def replace_segments(node: NodeAddress) -> NodeAddress:
    return NodeAddress(node.node, node.boot, node.control, {"rdma": "x"}, node.arena_base, node.page_bytes)


def test_objects_of_a_living_node_do_not_help_behind_those_of_a_dead_one() -> None:
    rig = Rig()
    data = rig.random_objects(4)
    objects = chain(rig, data, node=lambda n: n % 2)
    rig.node["two"].transfer.close()
    seen = rig.run(rig.load_job(objects))
    assert rig.load_report().valid == 1
    assert seen.invalid == blocks_of(objects[1:])
    assert held(rig, data)[0]


def test_objects_of_several_nodes_make_one_load() -> None:
    rig = Rig()
    data = rig.random_objects(5)
    rig.run(rig.load_job(chain(rig, data, node=lambda n: n % 2)))
    assert held(rig, data) == [True] * 5
    assert rig.load_report().valid == 5


def test_bytes_that_land_after_the_deadline_reach_no_block() -> None:
    """The transfer does not end; the load is reported; then the bytes land, in staging that nobody uses."""
    rig = Rig()
    data = rig.random_objects(2)
    objects = chain(rig, data)
    fault = rig.network.plan(Fault.HOLD, times=2, writes=False)
    seen = rig.run(rig.load_job(objects, deadline_s=0.05))
    assert fault.hits > 0
    assert (rig.load_report().valid, rig.load_report().reason) == (0, MissReason.TOO_SLOW)
    assert seen.invalid == blocks_of(objects)
    before = rig.engine.bytes_of(range(1, 64))
    assert rig.network.release() > 0
    assert rig.network.late_bytes > 0
    assert rig.engine.bytes_of(range(1, 64)) == before
    again = rig.load_job(chain(rig, data), "again")
    rig.run(again)
    assert held(rig, data) == [True, True], "late bytes damaged a later load"


class Hanging:
    """A mover whose every pull hangs at a gate, and which then goes on as if no time had passed."""

    def __init__(self, mover: Mover, gate: Gate) -> None:
        self._mover, self._gate = mover, gate

    def pull_each(
        self, node: NodeAddress, items: Sequence[PullItem], deadline_s: float
    ) -> Iterator[tuple[int, PullResult]]:
        self._gate.pass_through()
        yield from self._mover.pull_each(node, items, 60.0)


def test_the_first_objects_are_in_their_blocks_while_the_last_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are asked for before any is waited for; the last does not come before the others were scattered. Mutants:
    reading one by one; scattering when everything has come."""
    rig = Rig()
    data = rig.random_objects(4)
    submit, wait, reads = rig.transfer.submit_read, rig.transfer.wait, list[Handle]()

    def submit_noted(segment: str, pieces: Sequence[Piece]) -> Handle:
        reads.append(submit(segment, pieces))
        return reads[-1]

    def wait_for_the_others(handle: Handle, timeout_s: float) -> Status:
        assert len(reads) == 4
        if handle == reads[3]:
            wait_until(lambda: held(rig, data) == [True, True, True, False])
        return wait(handle, timeout_s)

    monkeypatch.setattr(rig.transfer, "submit_read", submit_noted)
    monkeypatch.setattr(rig.transfer, "wait", wait_for_the_others)
    rig.run(rig.load_job(chain(rig, data)))
    assert held(rig, data) == [True] * 4
    assert rig.load_report().valid == 4


def test_a_mover_that_hangs_is_not_waited_for_and_writes_nothing_later() -> None:
    gate = Gate()
    rig = Rig(wrap=lambda mover: Hanging(mover, gate))
    data = rig.random_objects(2)
    objects = chain(rig, data)
    rig.step(rig.load_job(objects))
    assert gate.reached.wait(10)
    rig.clock.now += 5.0
    assert rig.step().finished == set(), "the mover's own answer may still come"
    rig.clock.now += GRACE_S
    step = rig.step()
    assert (step.finished, step.invalid) == ({"r"}, blocks_of(objects))
    before = rig.engine.bytes_of(range(1, 64))
    gate.opened.set()
    wait_until(lambda: rig.network.reads >= 2, what="the late pull has read")
    rig.worker.shutdown()
    assert rig.engine.bytes_of(range(1, 64)) == before
    assert rig.load_report().reason is MissReason.TOO_SLOW


class Raising:
    """A mover with a bug."""

    def __init__(self, _: Mover) -> None:
        self.calls = 0

    def pull_each(self, *_: Any) -> Iterator[tuple[int, PullResult]]:
        self.calls += 1
        raise ZeroDivisionError

    def push(self, *_: Any) -> list[PushResult]:
        self.calls += 1
        raise ZeroDivisionError


def test_a_thread_that_meets_a_bug_still_reports() -> None:
    """Also more often than there are threads. What may be on its way of a save, nobody knows."""
    rig = Rig(wrap=Raising)
    for n in range(6):
        job = rig.load_job(chain(rig, rig.random_objects(2)), f"r{n}")
        assert rig.run(job).loads[job.job][0].valid == 0
        save = rig.save_job([(5, 9)])
        [report] = rig.run(save).saves[save.job]
        assert (report.checksums, report.quiet) == ((None,), False)
    assert rig.everything().invalid == {11, 12, 13, 14}


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch, method: str) -> Iterator[Gate]:
    """Every scatter or gather waits at a gate in the middle of its work."""
    gate, original = Gate(), getattr(HostCopies, method)

    def slow(self: HostCopies, *arguments: Any) -> None:
        gate.pass_through()
        original(self, *arguments)

    monkeypatch.setattr(HostCopies, method, slow)
    yield gate
    gate.opened.set()


def test_a_scatter_under_way_ends_before_its_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else vLLM would give the blocks to another request while they are written."""
    rig = Rig()
    data = rig.random_objects(2)
    objects = chain(rig, data)
    with gated(monkeypatch, "scatter") as gate:
        rig.step(rig.load_job(objects))
        assert gate.reached.wait(10)
        rig.clock.now += 60.0
        for _ in range(3):
            assert rig.step().finished == set()
        gate.opened.set()
        wait_until(lambda: rig.reported(rig.step()))
    assert rig.everything().invalid == blocks_of(objects), "what came too late is not believed"
    assert rig.load_report().reason is MissReason.TOO_SLOW
    assert held(rig, data)[1] is False, "no scatter is begun after the deadline"


def test_a_request_never_finishes_before_its_bad_blocks_are_known() -> None:
    """A load that fails between two hooks of a step is reported by the next step, in all its parts."""
    gate = Gate()
    rig = Rig(wrap=lambda mover: Hanging(mover, gate))
    rig.node["one"].transfer.close()
    objects = chain(rig, rig.random_objects(1))
    rig.step(rig.load_job(objects))
    assert gate.reached.wait(10)
    assert rig.worker.get_transfer_results(set()).finished_recving == set()
    gate.opened.set()
    wait_until(lambda: not rig.worker._loads, what="the load has ended")
    assert rig.worker.get_block_ids_with_load_errors() == set()
    assert rig.worker.build_connector_worker_meta() is None
    step = rig.step()
    assert (step.finished, step.invalid, len(step.loads)) == ({"r"}, blocks_of(objects), 1)


def test_an_aborted_request_is_reported_like_any_other() -> None:
    """vLLM keeps its blocks until then."""
    rig = Rig()
    job = rig.load_job(chain(rig, rig.random_objects(3)))
    rig.step(job, finished=frozenset({"r"}))
    wait_until(lambda: job.job in rig.reported(rig.step(finished=frozenset({"r"}))))
    assert rig.everything().finished == {"r"}


def test_a_job_that_must_fail_fails_at_once_in_all_its_blocks() -> None:
    rig = Rig()
    nothing = LoadObject(rig.stored(rig.random_objects(1)[0], (1, 2)).key, 0, b"", (), 0, b"", (21, 22, 23))
    job = replace(rig.load_job([nothing], deadline_s=0.0), nodes=())
    step = rig.step(job)
    assert (step.finished, step.invalid) == ({"r"}, {21, 22, 23})
    assert rig.network.reads == 0


def test_a_job_without_objects_is_reported_too() -> None:
    rig = Rig()
    assert rig.step(rig.load_job([])).finished == {"r"}


@pytest.mark.parametrize("blocks", [(11,), (11, 12, 13), (11, 0), (11, 64)])
def test_a_job_that_cannot_be_is_a_report_and_no_crash(blocks: tuple[int, ...]) -> None:
    """A bug of ours in the other half costs a load, not the thread."""
    rig = Rig()
    [data] = rig.random_objects(1)
    wrong = replace(rig.stored(data, (11, 12)), blocks=blocks)
    seen = rig.run(rig.load_job([wrong], "wrong"))
    assert (seen.finished, rig.load_report().valid) == ({"wrong"}, 0)
    for n in range(8):  # more than there are threads
        good = rig.load_job(chain(rig, [data]), f"good {n}")
        assert rig.run(good).loads[good.job][0].valid == 1


def test_a_job_given_twice_is_carried_out_once() -> None:
    rig = Rig()
    job = rig.load_job(chain(rig, rig.random_objects(1)))
    rig.run(job, job)
    assert len(rig.everything().loads) == 1


faults = st.lists(
    st.tuples(st.sampled_from(list(Fault)), st.integers(0, 20_000), st.booleans()), min_size=0, max_size=4
)


@settings(max_examples=30)
@given(faults, st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(1, 3))
def test_whatever_fails_the_prefix_is_right_and_the_rest_is_reported(
    planned: list[tuple[Fault, int, bool]], nodes: list[int], jobs: int
) -> None:
    """Every load is reported once; its valid objects are in their blocks, bit by bit; the blocks of all others
    are reported."""
    rig = Rig()
    for fault, at_byte, reads in planned:
        rig.network.plan(fault, at_byte=at_byte, reads=reads)
    data = rig.random_objects(len(nodes), num_blocks=1)
    made = []
    for number in range(jobs):
        first = 1 + number * len(nodes)
        objects = [
            rig.stored(one, (first + n,), node) for n, (one, node) in enumerate(zip(data, nodes, strict=True))
        ]
        made.append(rig.load_job(objects, f"r{number}", deadline_s=0.05))
    seen = rig.run(*made)
    assert seen.finished == {job.request for job in made}
    invalid = set()
    for job in made:
        [report] = seen.loads[job.job]
        for wanted, one in list(zip(job.objects, data, strict=True))[: report.valid]:
            assert rig.engine.bytes_of([block for block in wanted.blocks if block]) == one
        invalid |= blocks_of(job.objects[report.valid :])
        assert (report.valid == len(job.objects)) == (report.reason is None)
    assert seen.invalid == invalid
    rig.worker.shutdown()
    Rig.alive.remove(rig)


# --- saves ----------------------------------------------------------------------------------------------


def test_a_save_writes_the_object_and_its_checksums() -> None:
    rig = Rig()
    job = rig.save_job([(5, 9), (6, 3)])
    rig.run(job)
    report = rig.save_report()
    assert report.quiet
    assert report.moved_bytes == sum(wanted.size_bytes for wanted in job.objects)
    for wanted, sums in zip(job.objects, report.checksums, strict=True):
        data = rig.node["one"].read(wanted.extents, wanted.size_bytes)
        assert data == rig.engine.bytes_of(wanted.blocks)
        assert sums is not None
        assert sorted(sums) == list(range(rig.geometry.num_runs))
        assert b"".join(sums[run] for run in sorted(sums)) == checksums(
            memoryview(data), rig.geometry.runs(len(data))
        )


def test_a_save_that_ends_between_two_hooks_of_its_step_is_not_begun_again() -> None:
    """vLLM calls both hooks in every step, before and after the forward pass, which may take long."""
    rig = Rig()
    job = rig.save_job([(5, 9)])
    jobs = Jobs(saves=[job], shape=Shape(rig.geometry, (0, rig.geometry.num_layers), 1))
    rig.worker.begin_saves(jobs)
    wait_until(lambda: not rig.worker._saves, what="the save has ended")
    rig.worker.begin_saves(jobs)
    rig.run()
    writes = rig.network.writes
    for _ in range(3):
        rig.step()
    assert rig.reported() == {job.job}
    assert rig.network.writes == writes


def test_what_one_engine_saves_another_loads() -> None:
    rig = Rig()
    job = rig.save_job([(5, 9)])
    rig.run(job)
    data = rig.engine.bytes_of([5, 9])
    [sums] = rig.save_report().checksums
    assert sums is not None
    table = b"".join(sums[run] for run in range(rig.geometry.num_runs))
    saved = job.objects[0]
    wanted = LoadObject(saved.key, 0, b"g" * 8, saved.extents, saved.size_bytes, table, (11, 12))
    rig.run(rig.load_job([wanted]))
    assert held(rig, [data]) == [True]


def test_a_write_that_is_refused_leaves_nothing_to_commit() -> None:
    rig = Rig()
    fault = rig.network.plan(Fault.REFUSE, reads=False)
    rig.run(rig.save_job([(5, 9), (6, 3)]))
    assert fault.hits == 1
    report = rig.save_report()
    assert (report.checksums, report.quiet, report.moved_bytes) == ((None, None), True, 0)
    assert report.reason is MissReason.NODE_DOWN


def test_an_object_that_cannot_be_gathered_is_reported_alone() -> None:
    rig = Rig()
    job = rig.save_job([(5, 9), (6, 64), (6, 3)])  # there is no block 64
    rig.run(job)
    first, second, third = rig.save_report().checksums
    assert first and third and second is None
    assert rig.save_report().reason is None, "the node is not to blame"


def test_a_write_that_may_still_land_is_not_quiet() -> None:
    rig = Rig()
    fault = rig.network.plan(Fault.HOLD, reads=False)
    rig.run(rig.save_job([(5, 9)], deadline_s=0.05))
    assert fault.hits == 1
    assert (rig.save_report().checksums, rig.save_report().quiet) == ((None,), False)
    assert rig.save_report().reason is MissReason.TOO_SLOW


def test_a_save_that_waited_until_its_deadline_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it began, so its pages are free at once; and nothing may begin after the report."""
    pushed: list[int] = []

    class Counting:
        def __init__(self, mover: Mover) -> None:
            self._mover = mover

        def push(self, node: NodeAddress, items: Sequence[PushItem], deadline_s: float) -> list[PushResult]:
            pushed.append(len(items))
            return self._mover.push(node, items, deadline_s)

    rig = Rig(wrap=Counting)
    with gated(monkeypatch, "gather") as gate:
        early = [rig.save_job([(5, 9)], deadline_s=600.0) for _ in range(3)]  # all threads that may save
        late = rig.save_job([(6, 3)], deadline_s=1.0)
        rig.step(*early, late)
        assert gate.reached.wait(10)
        rig.clock.now += 1.0 + GRACE_S
        [report] = rig.step().saves[late.job]
        assert (report.checksums, report.quiet, report.reason) == ((None,), True, None)
    rig.run(rig.save_job([(6, 3), (5, 9)]))
    wait_until(lambda: {job.job for job in early} <= rig.reported(rig.step()))
    assert pushed == [1, 1, 1, 2]
    untouched = bytes(late.objects[0].size_bytes)
    assert rig.node["one"].read(late.objects[0].extents, late.objects[0].size_bytes) == untouched


def test_a_save_that_hangs_is_reported_at_its_deadline_and_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    with gated(monkeypatch, "gather") as gate:
        rig.step(rig.save_job([(5, 9)], deadline_s=1.0))
        assert gate.reached.wait(10)
        rig.clock.now += 1.0 + GRACE_S
        [[report]] = rig.step().saves.values()
        assert (report.checksums, report.quiet, report.reason) == ((None,), False, MissReason.TOO_SLOW)
    rig.run(rig.save_job([(6, 3)]))
    assert len(rig.everything().saves) == 2


def test_loads_go_on_while_saves_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    data = rig.random_objects(2)
    with gated(monkeypatch, "gather") as gate:
        rig.step(*(rig.save_job([(5, 9)]) for _ in range(8)))
        assert gate.reached.wait(10)
        rig.run(rig.load_job(chain(rig, data)))
        assert held(rig, data) == [True, True]


# --- start and end --------------------------------------------------------------------------------------


def missing() -> Mover:
    raise ModuleNotFoundError("No module named 'mooncake'")


def unreachable() -> Mover:
    raise TransferFailed("memory cannot be registered")


@pytest.mark.parametrize("open_mover", [missing, unreachable])
def test_without_a_mover_the_engine_goes_on_without_the_store(
    open_mover: Callable[[], Mover], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.worker = WorkerHalf(open_mover, vllm_config(), rig.engine.config)
    rig.worker.register_kv_caches(rig.engine.tensors)
    unsupported = rig.worker.get_handshake_metadata().unsupported
    assert unsupported is not None
    assert "bytes cannot be moved" in unsupported
    load, save = rig.load_job(chain(rig, rig.random_objects(2))), rig.save_job([(5, 9)])
    step = rig.step(load, save)
    assert (step.finished, step.invalid) == ({"r"}, blocks_of(load.objects))
    [report] = step.saves[save.job]
    assert (report.checksums, report.quiet) == ((None,), True)


def test_a_layout_that_is_not_understood_is_said_to_the_other_half() -> None:
    engine = make_engine([mla_spec()])
    worker = WorkerHalf(missing, vllm_config(backend="AMX_MLA"), engine.config)
    worker.register_kv_caches(engine.tensors)
    assert "AMX_MLA" in str(worker.get_handshake_metadata().unsupported)


def test_the_handshake_is_that_of_the_tensors() -> None:
    rig = Rig()
    assert rig.worker.get_handshake_metadata() == rig.engine.understood().handshake


def test_nothing_is_reported_or_begun_after_shutdown() -> None:
    gate = Gate()
    rig = Rig(wrap=lambda mover: Hanging(mover, gate))
    data = rig.random_objects(1)
    rig.step(rig.load_job(chain(rig, data)), rig.save_job([(5, 9)]))
    assert gate.reached.wait(10)
    rig.steps.clear()
    rig.worker.shutdown()
    gate.opened.set()
    wait_until(lambda: rig.network.reads >= 1, what="the pull went on")
    rig.step(rig.load_job(chain(rig, data), "late"), rig.save_job([(6, 3)]))
    rig.clock.now += 60.0
    rig.step()
    assert (rig.everything().finished, rig.reported()) == (set(), set())
    assert held(rig, data) == [False]


def test_shutdown_waits_for_a_scatter_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM unmaps the blocks afterwards."""
    rig = Rig()
    with gated(monkeypatch, "scatter") as gate:
        rig.step(rig.load_job(chain(rig, rig.random_objects(1))))
        assert gate.reached.wait(10)
        ending = threading.Thread(target=rig.worker.shutdown)
        ending.start()
        wait_until(lambda: rig.worker._closed)
        assert ending.is_alive()
        gate.opened.set()
        ending.join(10)
        assert not ending.is_alive()
    assert rig.worker._touching == 0


def test_pages_of_the_rig_are_scattered() -> None:
    """Else these tests would not notice a mover that ignores extents."""
    extents = Rig().node["one"].grant(3 * PAGE_BYTES)
    assert all(abs(a.start_page - b.start_page) > 1 for a, b in pairwise(extents))
