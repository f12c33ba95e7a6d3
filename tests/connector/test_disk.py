"""Hits on NVMe, in vLLM's real scheduler: promised, promoted while the load is under way, given back when read.

The fake worker asserts that every object it reads is leased and in DRAM, the fake model that all KV is right.
"""

import pytest

from connector.metadata import Rank
from kvstore.core import MissReason
from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt

TEXT = prompt(1, 6 * CHUNK + 2 * BLOCK + 5)
STORED = 6 * CHUNK + 2 * BLOCK


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def answer(node) -> list[int]:
    """What TEXT is answered with; afterwards the node holds it: two chunks in DRAM, four and the tail on NVMe."""
    engine = Engine(node)
    answer = engine.generate("first", TEXT)
    engine.assert_nothing_left()
    node.calls.clear()
    node.on_disk = set(list(node.objects)[2:])
    return answer


def pulled(engine: Engine) -> int:
    return engine.half.shared.stats.pulled_tokens


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("room", [1, 2, 100])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
def test_a_prompt_larger_than_the_node_s_memory_streams_through_it(node, answer, room, ranks, ahead) -> None:
    """Mutants: nothing is given back before all has come; given back before all ranks have read it."""
    node.room = room
    engine = Engine(node, ranks=ranks, ahead=ahead)
    assert engine.generate("b", TEXT) == answer
    assert pulled(engine) == STORED
    assert len(engine.worker.seen_loads) == 1
    assert engine.half.shared.stats.loads_failed == 0
    engine.assert_nothing_left()


def test_nothing_is_given_back_before_all_ranks_have_read_it(node, answer) -> None:
    """Mutant: what the first rank has read. The other one reads pages that may hold anything by then."""
    engine = Engine(node, ranks=2)
    engine.worker.hold_loads = True
    engine.submit("b", TEXT)
    engine.step()
    [leased] = node.leases.values()
    everything = list(leased)
    engine.half.loads.progressed(0, {Rank(0, 0): 3})
    assert leased == everything
    engine.half.loads.progressed(0, {Rank(0, 1): 1})
    assert leased == everything[1:]
    engine.half.loads.progressed(0, {Rank(0, 1): 3})
    assert leased == everything[3:]
    engine.half.loads.progressed(77, {Rank(0, 1): 3})  # of a job that is over


def test_others_are_computed_while_a_request_s_objects_come(node, answer) -> None:
    """Mutant: a step that waits for a promotion."""
    node.room = 0
    engine = Engine(node, save=False)
    engine.submit("b", TEXT)
    engine.submit("c", prompt(4, CHUNK), max_tokens=10)
    for _ in range(12):
        engine.step()
    assert len(engine.tokens["c"]) == 10 and engine.tokens["b"] == []
    node.room = 100
    engine.run()
    assert engine.tokens["b"] == answer
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


@pytest.mark.parametrize("reason", [MissReason.DEVICE_DOWN, MissReason.BAD_COPY, MissReason.NO_ROOM])
def test_what_does_not_come_is_computed_and_the_reason_is_counted(node, answer, reason) -> None:
    node.disk_faults[list(node.objects)[4]] = reason
    engine = Engine(node)
    assert engine.generate("b", TEXT) == answer
    assert pulled(engine) == 4 * CHUNK
    assert engine.half.shared.stats.misses == {reason: 1}
    engine.assert_nothing_left()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_deadline_ends_a_promotion_that_does_not_end(node, answer, ranks) -> None:
    node.room = 1
    engine = Engine(node, load_timeout_s=10.0, ranks=ranks)
    engine.worker.hold_loads = True  # nothing is read, so nothing is given back, and there is no room
    engine.submit("b", TEXT)
    engine.step()
    engine.step()
    engine.now += 10.1
    engine.step()
    engine.worker.hold_loads = False
    engine.run()
    assert engine.tokens["b"] == answer
    assert pulled(engine) == 3 * CHUNK
    assert engine.half.shared.stats.misses == {MissReason.PROMOTE_DEADLINE: 1}
    engine.assert_nothing_left()


def test_the_lease_is_renewed_while_objects_come(node, answer) -> None:
    node.room = 0
    engine = Engine(node, load_timeout_s=100.0)
    engine.submit("b", TEXT)
    for _ in range(6):
        engine.step()
        engine.now += 12
    assert node.calls.count("renew") >= 2
    node.room = 100
    engine.run()
    assert engine.tokens["b"] == answer
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


def test_an_abort_ends_what_is_waited_for(node, answer) -> None:
    """Mutant: the load waits for NVMe until its deadline, and its blocks with it."""
    node.room = 0
    engine = Engine(node)
    engine.submit("b", TEXT)
    engine.step()
    engine.abort("b")
    engine.run(steps_max=5)
    assert "close" in node.calls
    engine.assert_nothing_left()


def test_a_silent_rank_keeps_no_lease_and_no_promotion(node, answer) -> None:
    node.room = 1
    engine = Engine(node, ranks=2, load_timeout_s=10.0)
    engine.worker.silent_rank = 1
    engine.submit("b", TEXT)
    for _ in range(4):
        engine.step()
    engine.now += 20.0
    engine.step()
    assert not node.leases
    engine.worker.silent_rank = None
    engine.run()
    assert engine.tokens["b"] == answer
    engine.assert_nothing_left()


def test_a_promise_that_is_used_in_part_gives_the_rest_back_at_once(node, answer) -> None:
    """A scheduler may load less than was promised: what it does not load is not promoted."""
    engine = Engine(node)
    engine.worker.hold_loads = True
    request = engine.submit("b", TEXT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (STORED, True)
    manager = engine.scheduler.kv_cache_manager
    manager.allocate_slots(request, 0, num_external_computed_tokens=3 * CHUNK, delay_cache_blocks=True)
    engine.connector.update_state_after_alloc(request, manager.get_blocks("b"), 3 * CHUNK)
    [keys] = node.leases.values()
    assert keys == list(node.objects)[:3]


def test_suspects_are_named_as_they_were_read(node, answer) -> None:
    """On NVMe a copy has another name than the one that came of it. Mutant: the promise's."""
    key = list(node.objects)[3]
    damaged = list(node.pages[node.objects[key].generation])
    damaged[3] = b"another request's"
    node.pages[node.objects[key].generation] = tuple(damaged)
    engine = Engine(node)
    assert engine.generate("b", TEXT) == answer
    assert engine.control.suspects == [key]
    assert pulled(engine) == 3 * CHUNK
    engine.assert_nothing_left()


def test_hints_go_with_the_lookup_at_arrival(node, answer) -> None:
    engine = Engine(node)
    asked: list[bool] = []
    lookup = engine.control.lookup

    def look_up(keys, *, prefetch=False):
        asked.append(prefetch)
        return lookup(keys, prefetch=prefetch)

    engine.control.lookup = look_up  # type: ignore[method-assign]
    engine.submit("b", TEXT)
    assert asked == [True]
    engine.run()
    engine.assert_nothing_left()
