"""Redis dies, hangs, forgets and lies. The index says `IndexDown` in time or answers; it comes back by itself."""

import asyncio
import shutil
import time

import pytest

from kvstore.core import IndexDown, Namespace, Tier
from kvstore.index import RedisIndex, layout
from kvstore.index.link import CALLS_AT_ONCE_MAX
from tests.contracts.index import holders, new_keys, new_node, record_of, until
from tests.index.servers import Cluster, SentinelGroup, command_calls
from tests.support import free_port

NODE = new_node()
TIMEOUT_S = 0.3
SLACK_S = 2.0  # for a machine that does other things; a call without a bound waits for ever


@pytest.fixture
def index(connect, own_redis):
    return connect(own_redis.url, timeout_s=TIMEOUT_S)


async def answers(index, keys) -> bool:
    try:
        await index.lookup(keys)
    except IndexDown:
        return False
    return True


async def test_a_hung_redis_costs_the_time_out_and_no_more(index, own_redis) -> None:
    keys = new_keys(600)
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    calls = {
        "lookup": lambda: index.lookup(keys),
        "merge": lambda: index.merge(NODE, dict.fromkeys(new_keys(2_000), Tier.DRAM)),
        "heartbeat": lambda: index.heartbeat(record_of(NODE), 8),
        "nodes": index.nodes,
        "leave": lambda: index.leave(NODE),
        "manifest": lambda: index.manifest(Namespace(keys[0])),
    }
    own_redis.pause()
    for name, call in calls.items():
        began = time.monotonic()
        with pytest.raises(IndexDown, match="did not answer within"):
            await call()
        assert TIMEOUT_S * 0.9 < time.monotonic() - began < TIMEOUT_S + SLACK_S, name
    own_redis.resume()
    await until(lambda: answers(index, keys))
    assert len(await index.lookup(keys)) == 600


async def test_closing_does_not_wait_for_a_hung_redis(own_redis) -> None:
    index = RedisIndex.connect(own_redis.url, timeout_s=TIMEOUT_S)
    await index.lookup(new_keys(1))
    own_redis.pause()
    with pytest.raises(IndexDown):
        await index.lookup(new_keys(1))
    await index.close()
    await index.close()
    own_redis.resume()


async def test_many_callers_of_a_hung_redis_all_return_in_time(index, own_redis, monkeypatch) -> None:
    keys, send = new_keys(40), index._link._send
    sending = most = 0

    async def counted(commands):
        nonlocal sending, most
        sending += 1
        most = max(most, sending)
        try:
            return await send(commands)
        finally:
            sending -= 1

    monkeypatch.setattr(index._link, "_send", counted)
    own_redis.pause()
    began = time.monotonic()
    results = await asyncio.gather(*(index.lookup(keys) for _ in range(300)), return_exceptions=True)
    assert {type(result) for result in results} == {IndexDown}
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert most == CALLS_AT_ONCE_MAX, "the others waited, for as long as they may"
    own_redis.resume()
    await until(lambda: answers(index, keys))


async def test_a_restarted_redis_is_used_again_without_an_error(index, own_redis) -> None:
    """Connections of the pool are dead, and nobody notices."""
    (key,) = new_keys(1)
    await index.merge(NODE, {key: Tier.DRAM})
    assert await index.heartbeat(record_of(NODE), 30)
    own_redis.restart()
    assert await index.lookup([key]) == []
    assert not await index.heartbeat(record_of(NODE), 30)
    await index.merge(NODE, {key: Tier.DRAM})
    assert await holders(index, key) == {NODE: Tier.DRAM}


async def test_a_redis_that_was_away_is_found_again(index, own_redis) -> None:
    own_redis.kill()
    with pytest.raises(IndexDown):
        await index.lookup(new_keys(1))
    own_redis.restart()
    assert await index.lookup(new_keys(1)) == []


async def test_an_old_dump_is_noticed(index, own_redis) -> None:
    """The dump holds the fence of an earlier write, so the later ones are known to be lost."""
    first, second = new_keys(2)
    await index.merge(NODE, {first: Tier.DRAM})
    assert await index.heartbeat(record_of(NODE), 30)
    with own_redis.client() as client:
        client.save()
    shutil.copy(own_redis.folder / "dump.rdb", own_redis.folder / "old.rdb")
    await index.merge(NODE, {first: None, second: Tier.DRAM})
    own_redis.kill()
    shutil.copy(own_redis.folder / "old.rdb", own_redis.folder / "dump.rdb")
    own_redis.restart()
    assert await holders(index, first) == {NODE: Tier.DRAM}, "the index lies, as it may"
    assert not await index.heartbeat(record_of(NODE), 30)
    assert await index.heartbeat(record_of(NODE), 30)


async def test_a_dump_that_has_everything_is_no_loss(index, own_redis) -> None:
    await index.merge(NODE, dict.fromkeys(new_keys(3), Tier.DRAM))
    assert await index.heartbeat(record_of(NODE), 30)
    with own_redis.client() as client:
        client.save()
    own_redis.restart()
    assert await index.heartbeat(record_of(NODE), 30)


async def test_a_heartbeat_that_timed_out_is_not_taken_for_a_loss(index, own_redis) -> None:
    record = record_of(NODE)
    assert await index.heartbeat(record, 30)
    own_redis.pause()
    with pytest.raises(IndexDown):
        await index.heartbeat(record, 30)
    own_redis.resume()
    await until(lambda: answers(index, new_keys(1)))
    assert await index.heartbeat(record, 30)


async def test_a_write_executed_after_its_time_out_does_not_undo_a_newer_one(index, own_redis) -> None:
    """The stopped Redis has a merge of ours in its socket and executes it, whenever; the last state holds."""
    keys = new_keys(100)
    await index.merge(NODE, {keys[0]: Tier.DRAM})
    before = command_calls(own_redis.client, "evalsha")
    own_redis.pause()
    with pytest.raises(IndexDown):
        await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    own_redis.resume()
    await index.merge(NODE, dict.fromkeys(keys, None))
    await until(lambda: asyncio.to_thread(lambda: command_calls(own_redis.client, "evalsha") >= before + 2))
    assert [await holders(index, key) for key in keys] == [{}] * 100


async def test_a_caller_may_give_up_and_the_next_answer_is_right(index, own_redis) -> None:
    """Cancelled in mid-call: the reply that still comes must not answer somebody else's question."""
    mine, yours = new_keys(1), new_keys(1)
    await index.merge(NODE, {mine[0]: Tier.DRAM})
    for _ in range(20):
        call = asyncio.ensure_future(index.lookup(mine))
        for _ in range(6):
            await asyncio.sleep(0)
        call.cancel()
        assert await index.lookup(yours) == []
        assert len(await index.lookup(mine)) == 1


NOWHERE = ["redis://", "rediss://", "redis+cluster://", "redis+sentinel://", "unix://"]


@pytest.mark.parametrize("scheme", NOWHERE)
async def test_nobody_is_there_in_any_shape(connect, tmp_path, scheme) -> None:
    place = f"{tmp_path}/none.sock" if scheme == "unix://" else f"127.0.0.1:{free_port()}"
    index = connect(f"{scheme}{place}" + "/main" * ("sentinel" in scheme), timeout_s=TIMEOUT_S)
    for call in (index.lookup(new_keys(1)), index.heartbeat(record_of(NODE), 8)):
        with pytest.raises(IndexDown) as caught:
            await call
        text = str(caught.value)
        assert text.startswith(f"Redis at {scheme}{place}")
        assert "; check" in text
        assert len(text.replace(str(tmp_path), "")) < 400
        assert "\n" not in text


async def test_something_else_is_there(connect) -> None:
    """A web server's port, say: it answers, though not as Redis would."""

    async def answer(reader, writer) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(IndexDown, match="Protocol error"):
            await connect(f"redis://127.0.0.1:{port}", timeout_s=TIMEOUT_S).lookup(new_keys(1))


async def test_tls_where_redis_speaks_plainly(connect, own_redis) -> None:
    with pytest.raises(IndexDown):
        await connect(own_redis.url.replace("redis:", "rediss:"), timeout_s=1.0).lookup(new_keys(1))


# Cluster and Sentinel


@pytest.fixture
def own_cluster(tmp_path):
    with Cluster(tmp_path) as cluster:
        yield cluster


async def test_a_cluster_that_lost_one_shard_is_noticed(connect, redis_cluster) -> None:
    index, keys = connect(redis_cluster.url), new_keys(256)
    await index.heartbeat(record_of(NODE), 30)
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    assert await index.heartbeat(record_of(NODE), 30)
    with redis_cluster.servers[1].client() as client:
        client.flushall()
    assert len(await index.lookup(keys)) < 256
    assert not await index.heartbeat(record_of(NODE), 30)
    assert await index.heartbeat(record_of(NODE), 30)


async def test_a_slot_may_move_while_the_index_is_in_use(connect, own_cluster) -> None:
    index, keys = connect(own_cluster.url), new_keys(512)
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    source, target = own_cluster.servers[:2]
    with source.client() as client, target.client() as taker:
        slots = {tag: int(client.execute_command("CLUSTER KEYSLOT", f"{{{tag:02x}}}")) for tag in range(64)}
        tag = next(tag for tag, slot in slots.items() if slot <= 5460)
        moved = [key for key in keys if layout.partition(key) == tag]
        client.delete(layout.fence_name(NODE, tag), *map(layout.key_name, moved))
        owner = taker.execute_command("CLUSTER MYID").decode()
        for server in own_cluster.servers:
            with server.client() as each:
                each.execute_command("CLUSTER SETSLOT", slots[tag], "NODE", owner)
    await index.merge(NODE, dict.fromkeys(moved, Tier.DRAM))
    assert len(await index.lookup(keys)) == 512
    with target.client() as taker:
        assert taker.exists(*map(layout.key_name, moved)) == len(moved) > 0


async def test_a_cluster_node_that_dies_and_returns(connect, own_cluster) -> None:
    index, keys = connect(own_cluster.url, timeout_s=1.0), new_keys(512)
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    own_cluster.servers[0].process.kill()
    began = time.monotonic()
    with pytest.raises(IndexDown, match=r"redis\+cluster://127.0.0.1"):
        await index.lookup(keys)
    assert time.monotonic() - began < 1.0 + SLACK_S
    own_cluster.servers[0].restart()
    await asyncio.to_thread(own_cluster.wait_until_whole)
    await until(lambda: answers(index, keys), 20)
    await index.merge(NODE, dict.fromkeys(keys, Tier.DRAM))
    assert len(await index.lookup(keys)) == 512


async def test_sentinel_leads_to_the_new_primary(connect, tmp_path) -> None:
    with SentinelGroup(tmp_path) as group:
        index, (key,) = connect(group.url, timeout_s=1.0), new_keys(1)
        await index.merge(NODE, {key: Tier.DRAM})
        group.primary.process.kill()

        async def merged() -> bool:
            try:
                await index.merge(NODE, {key: Tier.NVME})
            except IndexDown:
                return False
            return True

        await until(merged, 30)
        assert await holders(index, key) == {NODE: Tier.NVME}
        with group.replica.client() as client:
            assert client.exists(layout.key_name(key))
