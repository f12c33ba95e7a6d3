"""Real `kvstore serve` processes: what they say, how they end, and what they leave behind."""

import json
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable

import msgspec
import psutil
import pytest
import redis

from kvstore.core import Key, Manifest, limits
from kvstore.wire import (
    VERSION,
    Acquire,
    Acquired,
    ClientId,
    Commit,
    CommitDone,
    CommitItem,
    Committed,
    Granted,
    Hello,
    LeaseId,
    Release,
    ReplyBody,
    Report,
    ReportItem,
    Request,
    RequestBody,
    Reserve,
    Reserved,
    ReserveItem,
    Resident,
    Welcome,
    decode_reply,
    encode,
)
from tests.support import Process, RedisServer, wait_until
from tests.support.frames import RawConnection
from tests.support.node import RunningNode, node_command, running_node

pytestmark = pytest.mark.process

MANIFEST = Manifest(
    weights="w",
    model={},
    kv_dtype="float32",
    tile_format="t",
    chunk_tokens=256,
    unit_tokens=1,
    lanes=((2, 2, 64),),
)
SIZE = MANIFEST.geometry.object_bytes(256)
TABLE = bytes(limits.CHECKSUM_BYTES * MANIFEST.geometry.num_runs)
KEY = Key(b"k" * limits.KEY_BYTES)
LEASE = LeaseId(b"l" * limits.LEASE_ID_BYTES)


class Talk:
    """A client that speaks the protocol and nothing else."""

    def __init__(self, address: str, token: bytes = b"") -> None:
        self._connection = RawConnection(address)
        self._token = token
        self._requests = 0

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, body: RequestBody) -> ReplyBody:
        self._requests += 1
        client = ClientId(b"c" * limits.CLIENT_ID_BYTES)
        self._connection.send(encode(Request(VERSION, client, self._requests, body, self._token)))
        frame = self._connection.receive(20.0)
        assert frame is not None, "no reply"
        reply = decode_reply(frame)
        assert reply.request_id == self._requests
        return reply.body

    def reserve(self, duration_s: float, key: Key = KEY) -> Reserved:
        welcome = self.ask(Hello(MANIFEST.namespace, MANIFEST.encode()))
        assert isinstance(welcome, Welcome), welcome
        item = ReserveItem(key=key, parent=Key(MANIFEST.namespace), depth=0, size_bytes=SIZE)
        reserved = self.ask(Reserve(MANIFEST.namespace, (item,), duration_s))
        assert isinstance(reserved, Reserved), reserved
        return reserved

    def commit(self, reserved: Reserved) -> ReplyBody:
        (granted,) = reserved.answers
        assert isinstance(granted, Granted), granted
        return self.ask(Commit(MANIFEST.namespace, (CommitItem(KEY, granted.generation, TABLE),)))


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A node that the tests of this module only look at."""
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running


def ended(pid: int) -> Callable[[], bool]:
    return lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def redis_child(node: RunningNode) -> int:
    (child,) = [child.pid for child in psutil.Process(node.pid).children() if "redis" in child.name()]
    return child


# --- what it says -----------------------------------------------------------------------------------


def test_the_banner_says_where_everything_is_and_what_to_mind(node) -> None:
    assert re.search(r"^kvstore 0\.1\.0, node \S+$", node.banner, re.MULTILINE)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", node.control)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", node.told("mooncake"))
    assert "arena     64 MiB" in node.banner
    assert "an embedded Redis, private to this node" in node.banner
    assert "warning: Mooncake listens on all interfaces without authentication" in node.banner


def test_the_banner_keeps_the_noise_of_libraries_and_the_password_of_redis_to_itself(node) -> None:
    for noise in ("Local segment descriptor", "InitGoogleLogging"):
        assert noise not in node.banner
    assert re.search(r"redis://:\*\*\*@127\.0\.0\.1:\d+/0", node.banner)


def test_the_line_to_paste_into_vllm_names_this_node(node) -> None:
    (line,) = [line for line in node.banner.splitlines() if "--kv-transfer-config" in line]
    flag, value = shlex.split(line)
    assert flag == "--kv-transfer-config"
    assert json.loads(value) == {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": node.control},
    }


def test_hello_tells_clients_what_the_banner_tells_people(node) -> None:
    with Talk(node.control) as talk:
        welcome = talk.ask(Hello())
    assert isinstance(welcome, Welcome)
    assert welcome.transfer == {"mooncake": node.told("mooncake")}
    assert welcome.arena_bytes == 64 * limits.MIB
    assert welcome.page_bytes == limits.MIB
    assert welcome.index_url.startswith("redis://:")


# --- admin ------------------------------------------------------------------------------------------


def test_probes_metrics_and_stats_answer(node) -> None:
    assert node.get("/healthz") == (200, '{\n "status": "ok"\n}\n')
    assert node.get("/readyz")[0] == 200
    status, text = node.get("/metrics")
    assert status == 200
    assert 'kvstore_tier_bytes{tier="dram"} 6.7108864e+07' in text
    assert "kvstore_index_up 1.0" in text
    stats = node.stats()
    assert stats["identity"]["control"] == node.control
    assert "***" in stats["identity"]["index"]


def test_what_clients_do_is_counted_and_listed(tmp_path) -> None:
    with running_node(tmp_path) as node, Talk(node.control) as talk:
        reserved = talk.reserve(10.0)
        assert talk.commit(reserved) == CommitDone((Committed(),))
        acquired = talk.ask(Acquire(MANIFEST.namespace, (KEY,), LEASE, 10.0))
        assert isinstance(acquired, Acquired)
        assert isinstance(acquired.answers[0], Resident)
        talk.ask(Release(LEASE, (KEY,)))
        talk.ask(Report((ReportItem("r1", 1000, 256, 256, None),)))

        def counted() -> bool:
            return node.stats()["store"]["totals"]["reports"] == 1

        wait_until(counted)
        text = node.get("/metrics")[1]
        for line in (
            'kvstore_objects{tier="dram"} 1.0',
            f'kvstore_object_bytes{{tier="dram"}} {float(SIZE)}',
            'kvstore_tokens_total{outcome="queried"} 1000.0',
            'kvstore_tokens_total{outcome="pulled"} 256.0',
            f"kvstore_push_bytes_total {float(SIZE)}",
            f"kvstore_pull_bytes_total {float(SIZE)}",
            "kvstore_push_seconds_count 1.0",
            "kvstore_pull_seconds_count 1.0",
            'kvstore_requests_total{call="Acquire"} 1.0',
        ):
            assert f"\n{line}\n" in text, line
        status, listing = node.get("/v1/objects?limit=1")
        assert status == 200
        (listed,) = json.loads(listing)["objects"]
        assert listed["key"] == KEY.hex()
        assert listed["size_bytes"] == SIZE


def test_a_token_is_asked_for_by_control_and_admin(tmp_path) -> None:
    token = "0123456789abcdef" * 2
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(0o600)
    with running_node(tmp_path, auth_token_file=file) as node:
        assert f'"token_file":"{file}"' in node.banner
        assert node.get("/healthz")[0] == 200
        assert node.get("/metrics")[0] == 401
        assert node.get("/metrics", token)[0] == 200
        with Talk(node.control) as stranger:
            assert msgspec.to_builtins(stranger.ask(Hello()))[:2] == ["Failed", "not_authorised"]
        with Talk(node.control, token.encode()) as friend:
            assert isinstance(friend.ask(Hello()), Welcome)


# --- how it ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_stops_it_in_order(number, tmp_path) -> None:
    with running_node(tmp_path) as node:
        child = redis_child(node)
        node.process.send(number)
        assert node.process.popen.wait(20) == 0
        assert ended(child)()
        output = node.process.output()
        assert f"stopping signal={number.name}" in output
        assert "Traceback" not in output
        for address in (node.control, node.admin):
            host, _, port = address.rpartition(":")
            socket.create_server((host, int(port))).close()


def test_its_heartbeat_is_withdrawn_when_it_stops(redis_url, tmp_path) -> None:
    with running_node(tmp_path, redis_url=redis_url) as node, redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: client.keys("kv:node:*"))
        assert not psutil.Process(node.pid).children()
        assert node.stop() == 0
        assert client.keys("kv:node:*") == []


def test_a_second_signal_ends_it_at_once(tmp_path) -> None:
    """The embedded Redis is stopped so that an orderly end would take seconds."""
    with running_node(tmp_path) as node:
        child = psutil.Process(redis_child(node))
        child.suspend()
        node.process.send(signal.SIGTERM)
        node.process.wait_for_output("stopping signal=SIGTERM")
        node.process.send(signal.SIGTERM)
        assert node.process.popen.wait(3) == -signal.SIGTERM
        wait_until(ended(child.pid))


def test_sigkill_leaves_no_redis_and_no_file_of_it_behind(tmp_path, monkeypatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running_node(tmp_path) as node:
        child = redis_child(node)
        node.kill()
        wait_until(ended(child))
    assert not list(temporary.iterdir())


def test_an_embedded_redis_that_is_killed_comes_back_with_all_that_was_published(tmp_path) -> None:
    with running_node(tmp_path) as node, Talk(node.control) as talk:
        assert talk.commit(talk.reserve(10.0)) == CommitDone((Committed(),))
        welcome = talk.ask(Hello())
        assert isinstance(welcome, Welcome)
        with redis.Redis.from_url(welcome.index_url) as client:
            wait_until(lambda: [name for name in client.scan_iter("kv:*") if KEY in name])
            psutil.Process(redis_child(node)).kill()
            wait_until(lambda: "\nkvstore_redis_restarts_total 1.0\n" in node.get("/metrics")[1], 30)
            wait_until(lambda: [name for name in client.scan_iter("kv:*") if KEY in name], 30)
        (line,) = [line for line in node.process.output().splitlines() if "Redis has ended" in line]
        assert "code=-9" in line


def test_it_starts_and_serves_while_redis_is_down_and_publishes_when_it_is_up(tmp_path) -> None:
    with RedisServer(tmp_path) as server:
        server.kill()
        with running_node(tmp_path, redis_url=server.url) as node:
            wait_until(lambda: "\nkvstore_index_up 0.0\n" in node.get("/metrics")[1])
            assert node.get("/readyz")[0] == 200
            with Talk(node.control) as talk:
                assert talk.commit(talk.reserve(10.0)) == CommitDone((Committed(),))
            server.restart()
            wait_until(lambda: "\nkvstore_published_keys_total 1.0\n" in node.get("/metrics")[1])
            with server.client() as client:
                assert [name for name in client.scan_iter("kv:*") if KEY in name]
            assert "\nkvstore_index_up 1.0\n" in node.get("/metrics")[1]


# --- asleep -----------------------------------------------------------------------------------------


def test_nothing_expires_while_it_is_stopped_and_what_is_over_while_it_is_awake(tmp_path) -> None:
    """Mutants: time.monotonic as the store's clock, then the reservation is gone; a clock that stands still."""
    with running_node(tmp_path) as node, Talk(node.control) as talk:
        reserved = talk.reserve(3.0)
        node.freeze()
        woken_s = time.monotonic() + 4.0
        wait_until(lambda: time.monotonic() > woken_s)
        node.thaw()
        assert talk.commit(reserved) == CommitDone((Committed(),))
        wait_until(lambda: node.stats()["slept_s"] > 2.0)
        assert node.stats()["store"]["totals"]["expired_reservations"] == 0
        wait_until(lambda: node.get("/healthz")[0] == 200)
        talk.reserve(0.2, Key(b"2" * limits.KEY_BYTES))
        wait_until(lambda: node.stats()["store"]["totals"]["expired_reservations"] == 1)


# --- mistakes ---------------------------------------------------------------------------------------


def one_line(tmp_path, expected_code: int, **settings: object) -> str:
    """What a node that cannot start says: one line, no traceback."""
    with Process(node_command(**settings), tmp_path / "refused.log") as process:
        assert process.popen.wait(30) == expected_code
        output = process.output()
    assert output.startswith("kvstore: ")
    assert output.count("\n") == 1, output
    return output


@pytest.mark.parametrize("endpoint", ["control", "admin"])
def test_a_taken_port_names_its_holder(endpoint, node, tmp_path) -> None:
    taken = getattr(node, endpoint)
    line = one_line(tmp_path, 1, **{f"{endpoint}_listen": taken})
    assert f"{taken} is taken by process {node.pid} (" in line
    assert "kvstore serve" in line
    assert f"--{endpoint}-listen" in line


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        ({"dram_size_bytes": "900TiB"}, 2, ["does not fit"]),
        ({"log_file": "/proc/nothing/log"}, 2, ["/proc/nothing does not exist"]),
        ({"log_file": "/dev/full"}, 1, ["/dev/full cannot be written: No space left on device", "make room"]),
        ({"control_listen": "192.0.2.1:7400", "insecure": True}, 1, ["not an address of this machine"]),
        ({"transfer_protocol": "rdma"}, 1, ["RDMA device", "tcp"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_only_shows_at_the_start_is_one_line_too(settings, code, says, tmp_path) -> None:
    line = one_line(tmp_path, code, **settings)
    for part in says:
        assert part in line


def test_a_wrong_redis_is_one_line_too(tmp_path) -> None:
    with RedisServer(tmp_path) as server, server.client() as client:
        client.config_set("requirepass", "secret")
        line = one_line(tmp_path, 2, redis_url=server.url)
    assert "check user and password in redis.url" in line
