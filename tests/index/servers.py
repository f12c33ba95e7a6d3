"""Redis in the shapes that users have: three Cluster nodes, and a primary with replica and Sentinel."""

import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import redis

from tests.support import Process, free_port, wait_until
from tests.support.redis import redis_binary

PLAIN = {"save": '""', "appendonly": "no"}


def port_with_bus() -> int:
    """A free port whose Cluster bus port, 10,000 above, is possible and was free, too."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError, OverflowError):
            probe.bind(("127.0.0.1", port + 10_000))
            return port


class Server:
    """A redis-server with options of our choice. Its address outlives a restart."""

    def __init__(self, folder: Path, name: str, options: dict[str, str], sentinel: bool = False) -> None:
        self.port = port_with_bus()
        self.folder = folder / f"{name}-{self.port}"
        self.folder.mkdir()
        self._sentinel = sentinel
        self._options = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder)} | options
        self.process = self._start()

    def _start(self) -> Process:
        file = self.folder / "redis.conf"
        if not file.exists():
            file.write_text("".join(f"{name} {value}\n" for name, value in self._options.items()))
        arguments = [redis_binary(), str(file), *(["--sentinel"] if self._sentinel else [])]
        with ExitStack() as stack:
            process = stack.enter_context(Process(arguments, self.folder / "log"))
            wait_until(self._answers, 15, f"redis-server answers, log in {self.folder}")
            stack.pop_all()
        return process

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port)

    def restart(self) -> None:
        self.process.kill()
        self.process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()


class Group:
    """Servers that belong together and end together, also when they do not come up."""

    def __init__(self, folder: Path) -> None:
        self.servers: list[Server] = []
        with ExitStack() as stack:
            self._stack = stack
            self.url = self._start(folder)
            self._stack = stack.pop_all()

    def _start(self, folder: Path) -> str:
        """Starts the servers with `_add`; answers the URL of all."""
        raise NotImplementedError

    def _add(self, folder: Path, name: str, options: dict[str, str], sentinel: bool = False) -> Server:
        server = self._stack.enter_context(Server(folder, name, options, sentinel))
        self.servers.append(server)
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def flush(self) -> None:
        """FLUSHALL on every server that takes writes."""
        for server in self.servers:
            with server.client() as client:
                if client.info("server")["redis_mode"] != "sentinel" and client.role()[0] == b"master":
                    client.flushall()


class Cluster(Group):
    """Three primaries without replicas, all slots covered."""

    def _start(self, folder: Path) -> str:
        options = PLAIN | {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
        for epoch, (first, last) in enumerate([(0, 5460), (5461, 10922), (10923, 16383)], start=1):
            server = self._add(folder, "cluster", options)
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(first, last + 1))
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.servers[0].port)
        self.wait_until_whole()
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers[:2])

    def wait_until_whole(self) -> None:
        """All nodes know each other and all slots."""

        def whole() -> bool:
            for server in self.servers:
                with server.client() as client:
                    info = client.execute_command("CLUSTER INFO")
                if info["cluster_state"] != "ok" or info["cluster_known_nodes"] != "3":
                    return False
            return True

        wait_until(whole, 30, "the cluster is whole")


class SentinelGroup(Group):
    """A primary, a replica and one Sentinel that fails over after half a second."""

    def _start(self, folder: Path) -> str:
        self.primary = self._add(folder, "primary", PLAIN | {"repl-diskless-sync-delay": "0"})
        self.replica = self._add(folder, "replica", PLAIN | {"replicaof": f"127.0.0.1 {self.primary.port}"})
        wait_until(self._linked, 30, "the replica follows")
        watch = {
            "sentinel monitor": f"main 127.0.0.1 {self.primary.port} 1",
            "sentinel down-after-milliseconds": "main 500",
            "sentinel failover-timeout": "main 3000",
        }
        self.sentinel = self._add(folder, "sentinel", watch, sentinel=True)
        wait_until(self._watched, 30, "Sentinel knows the replica")
        nobody = free_port()  # one of the Sentinels is down, as it may be
        return f"redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{self.sentinel.port}/main"

    def _linked(self) -> bool:
        with self.replica.client() as client:
            return client.info("replication")["master_link_status"] == "up"

    def _watched(self) -> bool:
        with self.sentinel.client() as client:
            return int(client.execute_command("SENTINEL MASTER", "main")["num-slaves"]) == 1


def command_calls(server_client: Callable[[], redis.Redis], *names: str) -> int:
    """How often a server has run these commands, whoever asked."""
    with server_client() as client:
        stats = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in names)
