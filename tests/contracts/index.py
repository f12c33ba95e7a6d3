"""What every index does, whatever it is made of (kvstore/index/base.py).

A subclass gives fixtures `index` and `peer`, two clients of one index, and `lose`, which makes the index forget
everything. Mutants that must fail here: a lookup that always answers nothing; one that goes on after a gap; a merge
that overwrites the whole value; a heartbeat that always says True, or always False.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.core import Key, Namespace, Tier, namespace_of
from kvstore.core.limits import INDEX_FIRST_KEYS
from kvstore.index import Index, NodeRecord
from kvstore.wire import BootId, NodeId

Lose = Callable[[], Awaitable[None]]
LONG = 512
EDGES = [0, 1, INDEX_FIRST_KEYS - 1, INDEX_FIRST_KEYS, INDEX_FIRST_KEYS + 1, LONG - 1]


def new_keys(count: int) -> list[Key]:
    return [Key(os.urandom(32)) for _ in range(count)]


def new_node() -> NodeId:
    return NodeId(os.urandom(8))


def record_of(node: NodeId, control: str = "127.0.0.1:1") -> NodeRecord:
    return NodeRecord(node=node, boot=BootId(b"bootboot"), control=control, free_bytes=7, arena_bytes=9)


async def holders(index: Index, key: Key) -> dict[NodeId, Tier]:
    """Who holds a key, and that nobody is named twice."""
    (locations,) = await index.lookup([key]) or [()]
    assert len({location.node for location in locations}) == len(locations)
    return {location.node: location.tier for location in locations}


class IndexContract:
    """The suite. Keys and nodes are fresh in every test, so that one index may serve many."""

    @pytest.mark.parametrize("length", [1, *EDGES[2:], LONG])
    async def test_what_is_merged_is_found_by_everybody(self, index: Index, peer: Index, length: int) -> None:
        keys, node = new_keys(length), new_node()
        await index.merge(node, dict.fromkeys(keys, Tier.DRAM))
        for client in (index, peer):
            found = await client.lookup(keys)
            assert [[(x.node, x.tier) for x in locations] for locations in found] == [
                [(node, Tier.DRAM)]
            ] * length

    @pytest.mark.parametrize("gap", EDGES)
    async def test_a_lookup_ends_where_the_prefix_ends(self, index: Index, gap: int) -> None:
        keys = new_keys(LONG)
        await index.merge(new_node(), {key: Tier.DRAM for key in keys if key != keys[gap]})
        assert len(await index.lookup(keys)) == gap

    @pytest.mark.parametrize("gap", EDGES)
    async def test_holders_of_keys_that_are_no_chain_are_told_one_by_one(
        self, index: Index, peer: Index, gap: int
    ) -> None:
        keys, node = new_keys(LONG), new_node()
        await index.merge(node, {key: Tier.DRAM for key in keys if key != keys[gap]})
        found = await peer.holders(keys)
        assert [[x.node for x in locations] for locations in found] == [
            [] if key == keys[gap] else [node] for key in keys
        ]
        assert await index.holders([]) == []

    async def test_nothing_is_found_where_nothing_is(self, index: Index) -> None:
        assert await index.lookup([]) == []
        assert await index.lookup(new_keys(3)) == []

    async def test_a_node_changes_its_own_entries_only(self, index: Index, peer: Index) -> None:
        (key,), one, other = new_keys(1), new_node(), new_node()
        await index.merge(one, {key: Tier.DRAM})
        await peer.merge(other, {key: Tier.NVME})
        assert await holders(index, key) == {one: Tier.DRAM, other: Tier.NVME}
        await index.merge(one, {key: None})
        assert await holders(peer, key) == {other: Tier.NVME}
        await peer.merge(other, {key: None})
        assert await holders(index, key) == {}

    async def test_the_last_state_holds_and_repeating_changes_nothing(self, index: Index) -> None:
        (key,), node = new_keys(1), new_node()
        for tier in (None, Tier.DRAM, Tier.DRAM, Tier.NVME, Tier.NVME, None, None, Tier.DRAM):
            await index.merge(node, {key: tier})
            assert await holders(index, key) == ({} if tier is None else {node: tier})

    async def test_nodes_that_publish_one_key_at_once_all_get_in(self, index: Index, peer: Index) -> None:
        keys, nodes = new_keys(3), [new_node() for _ in range(20)]
        merges = [
            (index, peer)[number % 2].merge(node, dict.fromkeys(keys, Tier.NVME))
            for number, node in enumerate(nodes)
        ]
        await asyncio.gather(*merges)
        for key in keys:
            assert await holders(index, key) == dict.fromkeys(nodes, Tier.NVME)

    async def test_a_merge_takes_any_number_of_keys(self, index: Index) -> None:
        keys, node = new_keys(2_000), new_node()
        await index.merge(node, {})
        await index.merge(node, dict.fromkeys(keys, Tier.DRAM))
        assert len(await index.lookup(keys)) == len(keys)

    async def test_keys_are_any_bytes(self, index: Index) -> None:
        keys = [Key(bytes([first]) + os.urandom(6) + b"{}\r\n\0 {a}:*".ljust(25)) for first in range(256)]
        await index.merge(new_node(), dict.fromkeys(keys, Tier.DRAM))
        assert len(await index.lookup(keys)) == 256
        assert all([await holders(index, key) for key in keys])

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))  # one suite, many implementations
    @given(
        merges=st.lists(
            st.tuples(
                st.integers(0, 2),
                st.dictionaries(st.integers(0, 5), st.sampled_from([None, Tier.DRAM, Tier.NVME]), min_size=1),
            ),
            max_size=12,
        )
    )
    async def test_it_is_a_map_of_maps(self, index: Index, peer: Index, merges) -> None:
        """Any history of merges by three nodes over six keys leaves what a plain dict would hold."""
        keys, nodes = new_keys(6), [new_node() for _ in range(3)]
        model: dict[Key, dict[NodeId, Tier]] = {key: {} for key in keys}
        for number, states in merges:
            await index.merge(nodes[number], {keys[at]: tier for at, tier in states.items()})
            for at, tier in states.items():
                model[keys[at]].pop(nodes[number], None)
                if tier is not None:
                    model[keys[at]][nodes[number]] = tier
        for key in keys:
            assert await holders(peer, key) == model[key]
        prefix = next((at for at, key in enumerate(keys) if not model[key]), len(keys))
        assert len(await peer.lookup(keys)) == prefix

    async def test_a_heartbeat_lists_a_node_until_it_leaves(self, index: Index, peer: Index) -> None:
        one, other = record_of(new_node(), "10.0.0.1:1"), record_of(new_node(), "10.0.0.2:2")
        assert await index.heartbeat(one, 30)
        assert await peer.heartbeat(other, 30)
        listed = {record.node: record for record in await peer.nodes()}
        assert (listed[one.node], listed[other.node]) == (one, other)
        await index.leave(one.node)
        await index.leave(one.node)
        assert other in await index.nodes()
        assert one not in await index.nodes()

    async def test_a_node_whose_heart_stops_leaves_the_list(self, index: Index, peer: Index) -> None:
        silent, living = record_of(new_node()), record_of(new_node())
        await index.heartbeat(silent, 0.2)
        await index.heartbeat(living, 30)
        alive = [record.node for record in await peer.nodes()]
        assert living.node in alive  # and `silent` unless this took longer than it lives

        async def gone() -> bool:
            return silent not in await peer.nodes()

        await until(gone)
        assert living in await peer.nodes()

    async def test_a_loss_is_told_once_to_every_node(self, index: Index, peer: Index, lose: Lose) -> None:
        one, other = record_of(new_node()), record_of(new_node())
        keys = new_keys(40)
        for client, record in ((index, one), (peer, other)):
            assert await client.heartbeat(record, 30)
            await client.merge(record.node, dict.fromkeys(keys, Tier.DRAM))
            assert await client.heartbeat(record, 30)
        await lose()
        assert await index.lookup(keys) == []
        assert [await index.heartbeat(one, 30), await peer.heartbeat(other, 30)] == [False, False]
        assert [await index.heartbeat(one, 30), await peer.heartbeat(other, 30)] == [True, True]
        assert {one.node, other.node} == {record.node for record in await index.nodes()}

    async def test_a_loss_behind_a_merge_is_told(self, index: Index, lose: Lose) -> None:
        """The merge after the loss must not hide it."""
        record, keys = record_of(new_node()), new_keys(2)
        await index.heartbeat(record, 30)
        await index.merge(record.node, {keys[0]: Tier.DRAM})
        await lose()
        await index.merge(record.node, {keys[1]: Tier.DRAM})
        assert not await index.heartbeat(record, 30)
        assert await index.heartbeat(record, 30)

    async def test_manifests_are_remembered(self, index: Index, peer: Index, lose: Lose) -> None:
        manifest = b'{"weights": "%d"}' % os.getpid()
        namespace = namespace_of(manifest)
        await index.put_manifest(namespace, manifest)
        await index.put_manifest(namespace, manifest)
        assert await peer.manifest(namespace) == manifest
        assert await peer.manifest(Namespace(os.urandom(32))) is None
        await lose()
        assert await peer.manifest(namespace) is None


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 15.0) -> None:
    """Waits until an awaited condition holds."""
    async with asyncio.timeout(deadline_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(0)
