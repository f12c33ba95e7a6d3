"""The worker half with objects that come from NVMe while their load is under way: real tensors, a real mover."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.metadata import LoadMore, LoadObject, Place, Rank
from connector.worker import GRACE_S
from kvstore.core import MissReason
from tests.connector.rig import Rig
from tests.connector.test_worker import blocks_of, chain, held
from tests.support import wait_until


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """The workers of a test end with it."""
    yield
    while Rig.alive:
        Rig.alive.pop().worker.shutdown()


def unplaced(wanted: LoadObject) -> LoadObject:
    """As it is promised on NVMe."""
    return replace(wanted, generation=b"on disk.", extents=(), table=b"", placed=False)


def place(wanted: LoadObject) -> Place:
    return Place(wanted.generation, wanted.extents, wanted.table)


def test_a_load_is_over_when_its_last_object_has_come() -> None:
    """Mutants: over when nothing is being read; progress that is not said, or said by nobody."""
    rig = Rig()
    data = rig.random_objects(4)
    objects = chain(rig, data)
    job = rig.load_job([*objects[:1], *map(unplaced, objects[1:])])
    rig.step(job)
    wait_until(lambda: rig.step().read == {job.job: {Rank(): 1}})
    rig.step(LoadMore(job.job, {2: place(objects[2]), 1: place(objects[1])}))
    wait_until(lambda: rig.step().read == {job.job: {Rank(): 3}})
    assert not rig.reported()
    rig.step(LoadMore(job.job, {3: place(objects[3])}))
    wait_until(lambda: rig.reported(rig.step()))
    rig.step(LoadMore(job.job, {3: place(objects[3])}))  # of a job that is over
    seen = rig.everything()
    assert held(rig, data) == [True] * 4
    assert (seen.finished, seen.invalid) == ({"r"}, set())
    assert rig.load_report().valid == 4 and len(rig.load_report().ends_s) == 4


def test_what_will_not_come_ends_the_prefix_with_all_blocks_behind_it() -> None:
    """Also those of an object that did come, behind the gap. Mutant: only what has not come is invalid."""
    rig = Rig()
    data = rig.random_objects(4)
    objects = chain(rig, data)
    job = rig.load_job([*objects[:1], *map(unplaced, objects[1:])])
    rig.step(job)
    rig.step(LoadMore(job.job, {3: place(objects[3])}))
    wait_until(lambda: rig.reported(rig.step()) or held(rig, data) == [True, False, False, True])
    rig.step(LoadMore(job.job, {1: place(objects[1])}, 2, MissReason.DEVICE_DOWN))
    wait_until(lambda: rig.reported(rig.step()))
    report = rig.load_report()
    assert (report.valid, report.reason) == (2, MissReason.DEVICE_DOWN)
    assert rig.everything().invalid == blocks_of(objects[2:])


def test_a_load_whose_objects_never_come_ends_at_its_deadline() -> None:
    rig = Rig()
    data = rig.random_objects(3)
    objects = chain(rig, data)
    job = rig.load_job([*objects[:1], *map(unplaced, objects[1:])], deadline_s=5.0)
    rig.step(job)
    wait_until(lambda: rig.reported(rig.step()) or held(rig, data)[0])
    rig.clock.now += 5.0 + GRACE_S
    rig.step()
    rig.step(LoadMore(job.job, {1: place(objects[1]), 2: place(objects[2])}))  # too late
    report = rig.load_report()
    assert (report.valid, report.reason) == (1, MissReason.PROMOTE_DEADLINE)
    assert rig.everything().invalid == blocks_of(objects[1:])
    assert held(rig, data) == [True, False, False]


def test_a_bad_object_among_those_that_came_later_is_suspected() -> None:
    rig = Rig()
    data = rig.random_objects(3)
    objects = chain(rig, data)
    rig.node["one"].flip(objects[2].extents, 100)
    job = rig.load_job([*objects[:1], *map(unplaced, objects[1:])])
    rig.step(job)
    rig.step(LoadMore(job.job, {1: place(objects[1]), 2: place(objects[2])}))
    wait_until(lambda: rig.reported(rig.step()))
    report = rig.load_report()
    assert (report.valid, report.reason, report.suspect) == (2, MissReason.BAD_COPY, 2)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_in_whatever_order_they_come_the_prefix_is_right(data) -> None:
    rig = Rig()
    count = 5
    contents = rig.random_objects(count)
    objects = chain(rig, contents, node=lambda n: n % 2)
    later = data.draw(st.permutations(range(data.draw(st.integers(0, count - 1)), count)))
    cut = data.draw(st.integers(0, len(later)))
    lost_from = data.draw(st.sampled_from([None, *later[cut:]]))
    job = rig.load_job([unplaced(one) if n in later else one for n, one in enumerate(objects)])
    rig.step(job)
    for n in later[:cut]:
        rig.step(LoadMore(job.job, {n: place(objects[n])}))
    if lost_from is not None:
        rig.step(LoadMore(job.job, {}, lost_from, MissReason.NO_ROOM))
    for n in later[cut:]:
        rig.step(LoadMore(job.job, {n: place(objects[n])}))
    wait_until(lambda: rig.reported(rig.step()))
    valid = count if lost_from is None else lost_from
    assert rig.load_report().valid == valid
    assert held(rig, contents)[:valid] == [True] * valid
    assert rig.everything().invalid == blocks_of(objects[valid:])
    Rig.alive.pop().worker.shutdown()
