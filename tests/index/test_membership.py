"""Which nodes a client believes to be alive."""

import pytest

from kvstore.core import IndexDown, Key, Tier
from kvstore.core.limits import HEARTBEAT_EXPIRY_S, LAST_NODES_KEPT_S
from kvstore.index import InProcessIndex, Membership
from tests.contracts.index import new_node, record_of

ONE, TWO = record_of(new_node()), record_of(new_node())


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Silent(InProcessIndex):
    down = False

    async def nodes(self):
        if self.down:
            raise IndexDown("down, says this test")
        return await super().nodes()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock) -> Silent:
    return Silent(clock)


@pytest.fixture
async def members(index, clock) -> Membership:
    """Two nodes are alive, and that is known."""
    members = Membership(index, clock)
    assert members.alive() == {}
    for record in (ONE, TWO):
        await index.heartbeat(record, HEARTBEAT_EXPIRY_S)
    await members.refresh()
    assert members.alive() == {ONE.node: ONE, TWO.node: TWO}
    return members


async def test_one_node_that_dies_leaves_at_once(members, index, clock) -> None:
    clock.now += HEARTBEAT_EXPIRY_S - 1
    await index.heartbeat(ONE, HEARTBEAT_EXPIRY_S)
    clock.now += 2
    await members.refresh()
    assert members.alive() == {ONE.node: ONE}


async def test_when_all_vanish_the_last_list_is_kept_for_a_minute(members, clock) -> None:
    clock.now += HEARTBEAT_EXPIRY_S
    await members.refresh()
    for _ in range(int(LAST_NODES_KEPT_S) - 1):
        clock.now += 1
        await members.refresh()
        assert len(members.alive()) == 2
    clock.now += 1
    assert members.alive() == {}


async def test_a_node_that_announces_itself_ends_the_minute(members, index, clock) -> None:
    index.lose_everything()
    await members.refresh()
    clock.now += LAST_NODES_KEPT_S - 1
    await index.heartbeat(TWO, HEARTBEAT_EXPIRY_S)
    await members.refresh()
    assert members.alive() == {TWO.node: TWO}
    clock.now += 2
    assert members.alive() == {TWO.node: TWO}


async def test_while_the_index_is_down_the_last_list_stays(members, index, clock) -> None:
    index.down = True
    for _ in range(3):
        clock.now += LAST_NODES_KEPT_S
        with pytest.raises(IndexDown):
            await members.refresh()
        assert len(members.alive()) == 2


async def test_an_expired_entry_is_not_found(clock) -> None:
    index = InProcessIndex(clock, expiry_s=100)
    key = Key(bytes(32))
    await index.merge(ONE.node, {key: Tier.DRAM})
    clock.now += 99
    assert len(await index.lookup([key])) == 1
    clock.now += 1
    assert await index.lookup([key]) == []


async def test_the_list_is_a_copy(members) -> None:
    members.alive().clear()
    assert len(members.alive()) == 2
