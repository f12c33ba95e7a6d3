"""The publisher: whatever the index and the clock do, what it says of a key ends as what the node holds.

Mutants that must fail here: a key that leaves the dirty set after the send; a state that is read when the key is
marked; a batch that is forgotten on `IndexDown`; a pass that stops early; a loss that starts no pass.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import IndexDown, Key, Tier, limits
from kvstore.index import InProcessIndex, NodeRecord, Publisher, publisher
from kvstore.index.base import Index
from kvstore.wire import NodeId
from tests.contracts.index import holders, new_keys, new_node, record_of, until
from tests.support import wait_until_async

NODE, OTHER = new_node(), new_node()


class Node:
    """What a node holds, as far as a publisher can see."""

    def __init__(self, index: Index, **options: float) -> None:
        self.held: dict[Key, Tier] = {}
        self.asked = 0
        self.index = index
        self.publisher = Publisher(
            index, NODE, self.tier_of, self.keys, record=lambda: record_of(NODE), **options
        )

    def tier_of(self, key: Key) -> Tier | None:
        self.asked += 1
        return self.held.get(key)

    def keys(self) -> Iterator[Key]:
        yield from list(self.held)

    def put(self, key: Key, tier: Tier | None) -> None:
        """A commit, a spill or an eviction."""
        if tier is None:
            self.held.pop(key, None)
        else:
            self.held[key] = tier
        self.publisher.mark(key)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.publisher.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def settled(self, deadline_s: float = 15.0) -> None:
        await wait_until_async(lambda: self.publisher.settled, deadline_s, "everything is published")


class Faulty(InProcessIndex):
    """An index that can be down, that can be held up in the middle of a merge, and that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.refusals = 0
        self.merges: list[dict[Key, Tier | None]] = []
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.fail_after = False  # the merge arrives, its answer does not

    def _check(self) -> None:
        if self.down:
            self.refusals += 1
            raise IndexDown("the index is down, says this test")

    async def merge(self, node: NodeId, states: Mapping[Key, Tier | None]) -> None:
        self._check()
        self.begun.set()
        await self.go_on.wait()
        self._check()
        self.merges.append(dict(states))
        await super().merge(node, states)
        if self.fail_after:
            self.refusals += 1
            raise IndexDown("the answer was lost, says this test")

    async def heartbeat(self, record: NodeRecord, expiry_s: float) -> bool:
        self._check()
        return await super().heartbeat(record, expiry_s)

    async def leave(self, node: NodeId) -> None:
        self._check()
        await super().leave(node)


@pytest.fixture
def index() -> Faulty:
    return Faulty()


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats and retries many times a second."""
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(publisher, "_BACKOFF_FIRST_S", 0.001)


async def test_what_is_marked_is_published_and_what_goes_is_withdrawn(index) -> None:
    node, keys = Node(index), new_keys(3)
    async with node.running():
        for key in keys:
            node.put(key, Tier.DRAM)
        await node.settled()
        assert len(await index.lookup(keys)) == 3
        node.put(keys[0], Tier.NVME)
        node.put(keys[2], None)
        await node.settled()
        assert await holders(index, keys[0]) == {NODE: Tier.NVME}
        assert await holders(index, keys[2]) == {}
        assert [record.node for record in await index.nodes()] == [NODE]
    assert await index.nodes() == [], "an orderly end withdraws the heartbeat"


async def test_boot_publishes_all_keys_in_bounded_batches(index) -> None:
    node, keys = Node(index), new_keys(limits.INDEX_BATCH_KEYS_MAX * 3 + 7)
    node.held = dict.fromkeys(keys, Tier.NVME)
    async with node.running():
        await node.settled()
    assert max(map(len, index.merges)) == limits.INDEX_BATCH_KEYS_MAX
    assert len(await index.lookup(keys)) == len(keys)
    assert node.publisher.stats.sent_keys == len(keys)


async def test_a_new_key_does_not_wait_behind_a_pass(index) -> None:
    node, (key,) = Node(index), new_keys(1)
    node.held = dict.fromkeys(new_keys(limits.INDEX_BATCH_KEYS_MAX * 20), Tier.DRAM)
    index.go_on.clear()
    async with node.running():
        await index.begun.wait()
        node.put(key, Tier.DRAM)
        index.go_on.set()
        await node.settled()
    assert next(at for at, states in enumerate(index.merges) if key in states) == 1


@pytest.mark.parametrize(("then", "now"), [(Tier.DRAM, None), (None, Tier.DRAM), (Tier.DRAM, Tier.NVME)])
async def test_a_change_during_the_send_is_sent_again(index, then, now) -> None:
    node, (key,) = Node(index), new_keys(1)
    node.put(key, then)
    index.go_on.clear()
    async with node.running():
        await index.begun.wait()
        node.put(key, now)
        assert not node.publisher.settled
        index.go_on.set()
        await node.settled()
    assert [states.get(key) for states in index.merges] == [then, now]
    assert await holders(index, key) == ({} if now is None else {NODE: now})


async def test_the_state_is_read_when_it_is_sent(index) -> None:
    """Marked a thousand times while the sender is busy: sent once, as it is then."""
    node, keys = Node(index), new_keys(2)
    node.put(keys[0], Tier.DRAM)
    index.go_on.clear()
    async with node.running():
        await index.begun.wait()
        for at in range(1_001):
            node.put(keys[1], (Tier.DRAM, None)[at % 2])
        assert node.publisher.pending == 2
        index.go_on.set()
        await node.settled()
    assert [states[keys[1]] for states in index.merges if keys[1] in states] == [Tier.DRAM]


@pytest.mark.parametrize("arrives", [False, True], ids=["lost", "answer lost"])
async def test_a_failed_batch_stays_dirty_until_it_is_confirmed(index, quick, caplog, arrives) -> None:
    caplog.set_level(logging.INFO)
    node, keys = Node(index), new_keys(600)
    index.down, index.fail_after = not arrives, arrives
    async with node.running():
        for key in keys:
            node.put(key, Tier.DRAM)
        await wait_until_async(lambda: index.refusals > 20)
        assert node.publisher.pending == 600
        assert not node.publisher.stats.up or arrives  # with the answer lost, heartbeats go on
        node.put(keys[0], None)
        index.down = index.fail_after = False
        await node.settled()
        assert await index.lookup(keys) == []
        assert len(await index.lookup(keys[1:])) == 599
        assert node.publisher.stats.failures >= 20
    if not arrives:
        lines = [record.message for record in caplog.records]
        assert [line for line in lines if "says this test" in line] == lines[:1], "said once, not each time"
        assert "answers again" in lines[1]


async def test_a_loss_starts_a_pass(index, quick) -> None:
    node, keys = Node(index), new_keys(700)
    node.held = dict.fromkeys(keys, Tier.DRAM)
    async with node.running():
        await node.settled()
        index.lose_everything()
        assert await index.lookup(keys) == []
        await wait_until_async(lambda: node.publisher.stats.losses == 1)
        await node.settled()
        assert len(await index.lookup(keys)) == 700
    assert node.publisher.stats.passes == 2


async def test_the_regular_pass_repairs_what_nobody_noticed(index) -> None:
    node, keys = Node(index, pass_s=0.05), new_keys(50)
    node.held = dict.fromkeys(keys, Tier.DRAM)
    async with node.running():
        await node.settled()
        await index.merge(NODE, dict.fromkeys(keys[::10], None))
        assert await index.lookup(keys) == []

        async def repaired() -> bool:
            return len(await index.lookup(keys)) == 50

        await until(repaired)


async def test_passes_are_as_rare_as_there_are_many_keys(index, monkeypatch) -> None:
    monkeypatch.setattr(publisher, "INDEX_PASS_S_MIN", 0.01)
    few, many = Node(index), Node(index)
    few.held, many.held = (dict.fromkeys(new_keys(count), Tier.DRAM) for count in (10, 1_000))
    monkeypatch.setattr(publisher, "INDEX_PASS_KEYS_PER_S", 20)
    async with few.running(), many.running():
        await wait_until_async(lambda: few.publisher.stats.passes >= 3)
    assert many.publisher.stats.passes == 1, "1,000 keys at 20 a second: not before 50 s are over"


async def test_a_pass_takes_half_of_the_way_to_redis_at_most(index) -> None:
    """It rests after each batch for as long as the batch took. A lower bound: slow machines only add to it."""
    node, spent = Node(index), 0.0
    node.held = dict.fromkeys(new_keys(limits.INDEX_BATCH_KEYS_MAX * 5), Tier.DRAM)
    merge, loop = index.merge, asyncio.get_running_loop()

    async def slow(who, states) -> None:
        nonlocal spent
        began = loop.time()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.02)
        await merge(who, states)
        spent += loop.time() - began

    index.merge = slow
    began = loop.time()
    async with node.running():
        await node.settled()
    assert len(index.merges) == 5
    assert loop.time() - began > spent * 1.7


async def test_a_pass_over_keys_that_have_gone_goes_in_slices(index) -> None:
    """The store was turned over since the pass began. Mutant: look for a batch of keys that are still held."""
    node, keys = Node(index), new_keys(limits.INDEX_BATCH_KEYS_MAX * 20)
    node.publisher._all_keys = lambda: iter(keys)
    node.held[keys[-1]] = Tier.DRAM
    looked_at = []
    async with node.running():
        while not node.publisher.settled:
            before = node.asked
            await asyncio.sleep(0)
            looked_at.append(node.asked - before)
    assert max(looked_at) <= limits.INDEX_BATCH_KEYS_MAX + 1
    assert sum(looked_at) > len(keys)
    assert await index.lookup(keys[-1:])


async def test_a_pass_bears_a_node_that_goes_on(index) -> None:
    """Keys come and go between its slices; at the end the index holds what the node holds."""
    node, keys = Node(index), new_keys(limits.INDEX_BATCH_KEYS_MAX * 4)
    node.held = dict.fromkeys(keys, Tier.DRAM)
    async with node.running():
        for key in keys[::3]:
            await asyncio.sleep(0)
            node.put(key, None)
        await node.settled()
    for at, key in enumerate(keys):
        assert bool(await holders(index, key)) == bool(at % 3)


async def test_too_many_dirty_keys_become_a_pass(index, monkeypatch) -> None:
    monkeypatch.setattr(publisher, "INDEX_DIRTY_KEYS_MAX", 100)
    node, keys = Node(index), new_keys(1_000)
    index.go_on.clear()
    async with node.running():
        await node.settled()  # the pass at boot finds nothing
        for key in keys:
            node.put(key, Tier.DRAM)
            assert node.publisher.pending <= 100
        index.go_on.set()
        await node.settled()
    assert node.publisher.stats.overflows == 9
    assert len(await index.lookup(keys)) == 1_000


async def test_a_key_that_is_marked_again_is_no_overflow(index, monkeypatch) -> None:
    monkeypatch.setattr(publisher, "INDEX_DIRTY_KEYS_MAX", 2)
    node, keys = Node(index), new_keys(2)
    for _ in range(3):
        for key in keys:
            node.put(key, Tier.DRAM)
    assert node.publisher.stats.overflows == 0


async def test_an_error_of_ours_is_not_taken_for_a_fault_of_the_index(index) -> None:
    node = Node(index)
    node.publisher._all_keys = lambda: iter([Key(bytes(1 // 0))])
    with pytest.raises(ExceptionGroup) as caught:
        await node.publisher.run()
    assert caught.group_contains(ZeroDivisionError)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4), st.sampled_from([None, Tier.DRAM, Tier.NVME])),
        st.tuples(st.just("run"), st.integers(1, 8)),
        st.tuples(st.sampled_from(["down", "up", "hold", "go on", "lose answers", "answer", "mark all"])),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_after_any_history_the_index_says_what_the_node_holds(steps) -> None:
    """Changes, failures and held-up sends in any order: once all is quiet, both agree on every key."""

    async def history() -> None:
        index = Faulty()
        node, keys = Node(index), new_keys(5)
        switches = {
            "down": lambda: setattr(index, "down", True),
            "up": lambda: setattr(index, "down", False),
            "hold": index.go_on.clear,
            "go on": index.go_on.set,
            "lose answers": lambda: setattr(index, "fail_after", True),
            "answer": lambda: setattr(index, "fail_after", False),
            "mark all": node.publisher.mark_all,
        }
        async with node.running():
            for name, *arguments in steps:
                if name == "put":
                    node.put(keys[arguments[0]], arguments[1])
                elif name == "run":
                    for _ in range(arguments[0]):
                        await asyncio.sleep(0)
                else:
                    switches[name]()
            for name in ("up", "go on", "answer"):
                switches[name]()
            await node.settled()
        said = {key: (await holders(index, key)).get(NODE) for key in keys}
        assert said == {key: node.held.get(key) for key in keys}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "_BACKOFF_FIRST_S", 0.0)
        asyncio.run(history())
