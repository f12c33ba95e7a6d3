"""What only Redis can do to us: foreign values, forgotten scripts, late writes, refusals, and how often we ask."""

import asyncio
import random
import time

import pytest
from redis.asyncio import Connection

from kvstore.core import IndexDown, Key, Namespace, Tier
from kvstore.core.limits import INDEX_FIRST_KEYS
from kvstore.index import layout
from kvstore.index.base import Location
from kvstore.index.link import Command, _Plain
from tests.contracts.index import holders, new_keys, new_node, record_of
from tests.index.servers import command_calls

NODE, OTHER = new_node(), new_node()
HOUR = int(time.time() // 3600)
SOUND = layout.encode([Location(OTHER, Tier.DRAM, HOUR)])


@pytest.fixture
def index(connect, redis_url):
    return connect(redis_url, expiry_s=4 * 3_600)


@pytest.fixture
def raw(redis_server):
    """The same Redis, by hand."""
    with redis_server.client() as client:
        yield client


# How often we ask


@pytest.mark.parametrize(("missing", "trips"), [(None, 2), (400, 2), (INDEX_FIRST_KEYS, 2), (31, 1), (0, 1)])
async def test_a_lookup_of_512_keys_is_two_commands_at_most(index, redis_server, missing, trips) -> None:
    keys = new_keys(512)
    await index.merge(NODE, {key: Tier.DRAM for at, key in enumerate(keys) if at != missing})
    before = command_calls(redis_server.client, "mget", "get", "eval", "evalsha")
    assert len(await index.lookup(keys)) == (512 if missing is None else missing)
    assert command_calls(redis_server.client, "mget", "get", "eval", "evalsha") - before == trips


async def test_a_cluster_is_asked_once_per_tag(connect, redis_cluster) -> None:
    """512 keys are in at most 64 tags, each asked for at most twice, all at once."""
    index, keys = connect(redis_cluster.url), new_keys(512)
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    before = [command_calls(server.client, "mget") for server in redis_cluster.servers]
    assert len(await index.lookup(keys)) == 512
    after = [command_calls(server.client, "mget") for server in redis_cluster.servers]
    calls = [b - a for a, b in zip(before, after, strict=True)]
    assert all(calls), "every server holds some of the keys"
    tags = [len({layout.partition(key) for key in part}) for part in (keys[:32], keys[32:])]
    assert sum(calls) == sum(tags) <= 2 * layout.PARTITIONS


# Values that are not ours

FOREIGN = {
    "empty": b"",
    "text": b"hello, is this yours?",
    "version": b"\x02" + SOUND[1:],
    "version alone": b"\x01",
    "cut": SOUND[:-1],
    "longer": SOUND + b"x",
    "tier 0": SOUND[:9] + b"\x00" + SOUND[10:],
    "tier 9": SOUND[:9] + b"\x09" + SOUND[10:],
    "a good entry and a bad one": SOUND + OTHER + b"\x09" + SOUND[10:],
    "long": bytes(range(256)) * 400,
}


@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
async def test_a_foreign_value_is_absent_and_repaired_by_the_next_merge(index, raw, value) -> None:
    keys = new_keys(3)
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    raw.set(layout.key_name(keys[1]), value)
    assert len(await index.lookup(keys)) == 1
    await index.merge(NODE, {keys[1]: Tier.NVME})
    assert await holders(index, keys[1]) == {NODE: Tier.NVME}
    assert len(await index.lookup(keys)) == 3


async def test_a_foreign_type_is_absent_and_repaired_by_the_next_merge(index, raw) -> None:
    keys = new_keys(2)
    for key in keys:
        raw.rpush(layout.key_name(key), b"a list")
    assert await index.lookup(keys) == []
    await index.merge(NODE, {keys[0]: Tier.DRAM, keys[1]: None})
    assert await holders(index, keys[0]) == {NODE: Tier.DRAM}
    assert not raw.exists(layout.key_name(keys[1]))


async def test_script_and_reader_agree_which_values_are_sound(index, raw) -> None:
    """Of any value, the merge keeps exactly the entries that a reader saw (but those long expired)."""
    chance = random.Random(17)
    keys, before = new_keys(300), []
    for key in keys:
        entries = b"".join(
            chance.randbytes(8) + bytes([chance.choice([1, 2, 2, 3])]) + (HOUR - 1).to_bytes(3, "big")
            for _ in range(chance.randint(0, 3))
        )
        value = bytes([chance.choice([1, 1, 1, 0])]) + entries + chance.randbytes(chance.choice([0, 0, 0, 1]))
        raw.set(layout.key_name(key), value)
        before.append({(x.node, x.tier) for x in layout.decode(value)})
    assert 50 < sum(map(bool, before)) < 250
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    after = [{(x.node, x.tier) for x in locations} for locations in await index.lookup(keys)]
    assert after == [seen | {(NODE, Tier.DRAM)} for seen in before]


@pytest.mark.parametrize("fence", [b"abc", b"-5", b"1e400", b"nan", b"9" * 30, [b"a list"]], ids=repr)
async def test_a_foreign_fence_does_not_stop_publishing(index, raw, fence) -> None:
    node, (key,) = new_node(), new_keys(1)
    name = layout.fence_name(node, None)
    raw.rpush(name, *fence) if isinstance(fence, list) else raw.set(name, fence)
    await index.merge(node, {key: Tier.DRAM})
    assert await holders(index, key) == {node: Tier.DRAM}


async def test_foreign_records_and_manifests_are_absent(index, raw) -> None:
    record = record_of(new_node())
    await index.heartbeat(record, 30)
    raw.set(layout.node_name(record.node), b'{"node": 5}')
    assert await index.nodes() == []
    raw.delete(layout.NODES)
    raw.set(layout.NODES, b"a string")
    await index.heartbeat(record, 30)
    assert await index.nodes() == [record]


async def test_values_are_packed_as_the_page_says(index, raw) -> None:
    (key,) = new_keys(1)
    hours = [raw.time()[0] // 3_600]
    await index.merge(NODE, {key: Tier.NVME})
    hours.append(raw.time()[0] // 3_600)
    value = raw.get(b"kv:{%02x}" % (key[0] % 64) + key)
    assert value in [b"\x01" + NODE + b"\x02" + hour.to_bytes(3, "big") for hour in hours]
    assert layout.decode(layout.encode([Location(NODE, Tier.NVME, HOUR)])) == (
        Location(NODE, Tier.NVME, HOUR),
    )


@pytest.mark.parametrize(
    "command",
    [
        (
            "EVALSHA",
            "a" * 40,
            3,
            b"fence",
            bytes(32),
            b"\r\n$",
            b"node",
            1_764_600_000_000_000,
            14_400,
            b"\0\1",
        ),
        ("EVALSHA", "a" * 40, 1, b"", 0.5),
        ("MGET", bytes(32), b"\r\n" * 16),
        ("MGET", b"two", b"lengths"),
        ("CLIENT SETNAME", "kvstore"),
    ],
)
def test_commands_are_encoded_as_redis_py_does(command) -> None:
    usual = Connection.pack_command(Connection(), *command)
    assert b"".join(_Plain().pack_command(*command)) == b"".join(usual)


# Expiry and bounds


async def test_every_key_expires(connect, redis_url, raw) -> None:
    index, (key,) = connect(redis_url, expiry_s=7_200), new_keys(1)
    await index.merge(NODE, {key: Tier.DRAM})
    await index.heartbeat(record_of(NODE), 8)
    await index.put_manifest(Namespace(key), b"{}")
    left = {name: raw.ttl(name) for name in raw.keys(b"kv:*") if name != layout.NODES}
    assert len(left) == 4 and all(value > 0 for value in left.values())
    assert 7_190 < left[layout.key_name(key)] <= 7_200


async def test_a_merge_drops_entries_that_nobody_renewed(connect, redis_url, raw) -> None:
    """A key that one node renews for ever must not keep the entry of a node that died long ago."""
    index, (key,) = connect(redis_url, expiry_s=3 * 3_600), new_keys(1)
    young, old = Location(new_node(), Tier.DRAM, HOUR - 2), Location(OTHER, Tier.DRAM, HOUR - 5)
    raw.set(layout.key_name(key), layout.encode([old, young]))
    assert set(await holders(index, key)) == {old.node, young.node}
    await index.merge(NODE, {key: Tier.DRAM})
    assert set(await holders(index, key)) == {NODE, young.node}


async def test_a_value_is_bounded_and_the_newest_entries_stay(index) -> None:
    (key,) = new_keys(1)
    nodes = [new_node() for _ in range(layout.HOLDERS_MAX + 3)]
    for node in nodes:
        await index.merge(node, {key: Tier.DRAM})
    assert list(await holders(index, key)) == nodes[3:]


async def test_nodes_are_forgotten_by_the_clock_of_redis(index, raw) -> None:
    dead, living = record_of(new_node()), record_of(new_node())
    await index.heartbeat(dead, 30)
    raw.zadd(layout.NODES, {dead.node: raw.time()[0] - 7_200})
    await index.heartbeat(living, 30)
    assert raw.zrange(layout.NODES, 0, -1) == [living.node]


# Writes that come late


async def late(index, node, states: dict[Key, Tier | None], sequence: int) -> Command:
    """The command of a merge as it was sent when its number was `sequence`."""
    return index._merge(layout.fence_name(node, None), node, sequence, list(states.items()))


@pytest.mark.parametrize(("then", "now"), [(Tier.DRAM, None), (None, Tier.DRAM)])
async def test_a_write_that_arrives_after_a_newer_one_changes_nothing(index, then, now) -> None:
    """Without the fence, the first case leaves a stale entry and the second loses one."""
    node, (key,) = new_node(), new_keys(1)
    await index.merge(node, {key: then})
    stale = await late(index, node, {key: then}, index._sequence)
    await index.merge(node, {key: now})
    expected = {} if now is None else {node: now}
    (answer,) = await index._link.call([stale])
    assert answer >= index._sequence, "the script said why it refused"
    assert await holders(index, key) == expected


async def test_a_clock_that_went_back_does_not_stop_publishing(connect, redis_url) -> None:
    """The last boot of this node wrote with a clock an hour ahead: its number is adopted."""
    before, after = connect(redis_url), connect(redis_url)
    node, (key,) = new_node(), new_keys(1)
    before._sequence = (time.time_ns() // 1_000) + 3_600 * 1_000_000
    await before.merge(node, {key: Tier.DRAM})
    await after.merge(node, {key: Tier.NVME})
    assert await holders(after, key) == {node: Tier.NVME}
    assert after._sequence > before._sequence
    assert await after.heartbeat(record_of(node), 30), "nothing was lost"


async def test_answers_that_overtake_each_other_are_no_loss(index, monkeypatch) -> None:
    """A heartbeat's answer is read after that of a merge which Redis executed later."""
    record, (key,) = record_of(new_node()), new_keys(1)
    assert await index.heartbeat(record, 30)
    call, merged = index._link.call, asyncio.Event()

    async def held_up(commands):
        replies = await call(commands)
        if commands[0][0] == "SET":
            executed.set()
            await merged.wait()
        return replies

    executed = asyncio.Event()
    monkeypatch.setattr(index._link, "call", held_up)
    beat = asyncio.ensure_future(index.heartbeat(record, 30))
    await executed.wait()
    await index.merge(record.node, {key: Tier.DRAM})
    merged.set()
    assert await beat
    assert await index.heartbeat(record, 30)


async def test_a_forgotten_script_is_sent_again(index, raw, redis_server) -> None:
    (key,), record = new_keys(1), record_of(NODE)
    for tier in (Tier.DRAM, Tier.NVME):
        raw.script_flush()
        evals = command_calls(redis_server.client, "eval")
        await index.merge(NODE, {key: tier})
        assert await holders(index, key) == {NODE: tier}
        assert command_calls(redis_server.client, "eval") == evals + 1
        raw.script_flush()
        assert await index.heartbeat(record, 30)
    assert record in await index.nodes()


# Refusals: what happened, what it costs, what to do; never a secret


def refuse_memory(client) -> None:
    client.config_set("maxmemory", 1)
    client.config_set("maxmemory-policy", "noeviction")


REFUSALS = {
    "password": (lambda client: client.config_set("requirepass", "s3cret"), "redis.url"),
    "replica": (lambda client: client.replicaof("127.0.0.1", 1), "primary"),
    "memory": (refuse_memory, "maxmemory"),
    "rights": (lambda client: client.execute_command("ACL SETUSER default -evalsha -eval"), "ACL"),
}


@pytest.mark.parametrize(("refuse", "remedy"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_says_what_it_costs_and_what_to_do(connect, own_redis, refuse, remedy) -> None:
    with own_redis.client() as client:
        refuse(client)
    url = own_redis.url.replace("//", "//default:wr0ng@") if remedy == "redis.url" else own_redis.url
    with pytest.raises(IndexDown) as caught:
        await connect(url).merge(NODE, dict.fromkeys(new_keys(1), Tier.DRAM))
    text = str(caught.value)
    assert f"127.0.0.1:{own_redis.port}" in text
    assert remedy in text
    assert "neither found nor published" in text
    assert "\n" not in text
    assert "wr0ng" not in text


async def test_a_redis_that_is_not_there_is_down_at_once(connect, own_redis) -> None:
    own_redis.kill()
    index = connect(own_redis.url)
    for call in (index.lookup(new_keys(2)), index.nodes(), index.heartbeat(record_of(NODE), 8)):
        with pytest.raises(IndexDown, match="check that it runs"):
            await call


def test_numbers_of_writes_stay_exact_in_lua_for_a_century() -> None:
    century_us = 100 * 366 * 86_400 * 1_000_000
    assert time.time_ns() // 1_000 + century_us < layout.SEQUENCE_MAX
    assert float(layout.SEQUENCE_MAX) != float(layout.SEQUENCE_MAX - 1)
