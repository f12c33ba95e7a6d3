"""Engines as the proxy sees them: which are up, how busy they are, and how a wait for one ends.

    up --(a request fails)-------------------> suspect --(health check succeeds)--> up
    up --(checks fail, several in a row)-----> down    --(health check succeeds)--> up

A suspect gets no new request until a health check, made at once, has cleared it; so a dead engine costs one
request one retry, and a healthy one that lost a connection is back in milliseconds. An engine that goes down by
its checks also ends every wait for it, which is how a stopped process or a host without power is left behind.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum

import aiohttp

from kvstore.proxy.config import ProxyConfig

log = logging.getLogger(__name__)


class Role(StrEnum):
    """What an engine is asked for. One that is named for both has two entries."""

    PREFILL = "prefill"
    DECODE = "decode"


class Engine:
    """One engine in one role."""

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.url = url
        self.up = False
        self.in_flight = 0
        self.last_picked = 0
        self.check_now = asyncio.Event()
        self._failed_checks = 0
        self._waits: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<Engine {self.role} {self.url} {'up' if self.up else 'down'}, {self.in_flight} in flight>"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def patience(self, seconds: float) -> AsyncIterator[None]:
        """Bounds a wait for this engine: by time, and by its going down. TimeoutError either way."""
        async with asyncio.timeout(seconds) as limit:
            self._waits.add(limit)
            try:
                yield
            finally:
                self._waits.discard(limit)

    def suspect(self) -> None:
        """A request has failed: no more of them until a check has succeeded."""
        self.up = False
        self.check_now.set()

    def checked(self, alive: bool, failures_max: int) -> None:
        """The result of a health check."""
        if alive:
            if not self.up:
                log.info("engine is up role=%s engine=%s", self.role, self.url)
            self.up, self._failed_checks = True, 0
            return
        self._failed_checks += 1
        if self._failed_checks == failures_max:
            log.warning(
                "engine is down role=%s engine=%s failed_checks=%d", self.role, self.url, failures_max
            )
            self.up = False
            for wait in self._waits:
                if not wait.expired():
                    wait.reschedule(asyncio.get_running_loop().time())


class Engines:
    """All engines and their health checks.

    Args:
        config: names them.
        session: what requests are made with.
        clock: seconds, only growing.
    """

    def __init__(
        self,
        config: ProxyConfig,
        session: aiohttp.ClientSession,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.all = [
            *(Engine(Role.PREFILL, url) for url in config.prefill),
            *(Engine(Role.DECODE, url) for url in config.decode),
        ]
        self._config = config
        self._session = session
        self._clock = clock
        self._picks = 0
        self._changed = asyncio.Condition()

    def of(self, role: Role) -> list[Engine]:
        """Those of a role."""
        return [engine for engine in self.all if engine.role is role]

    def pick(self, role: Role, without: Iterable[Engine] = ()) -> Engine | None:
        """The one with the fewest requests in flight, among equals the one picked longest ago; None if none is up."""
        candidates = [engine for engine in self.of(role) if engine.up and engine not in without]
        if not candidates:
            return None
        best = min(candidates, key=lambda engine: (engine.in_flight, engine.last_picked))
        self._picks += 1
        best.last_picked = self._picks
        return best

    async def pick_soon(self, role: Role, without: Iterable[Engine] = ()) -> Engine | None:
        """The same, but waits a moment if one that may be asked is down. None: none came up in time."""
        tried = set(without)
        if not set(self.of(role)) - tried:
            return None
        try:
            async with asyncio.timeout(self._config.pick_s), self._changed:
                await self._changed.wait_for(lambda: any(e.up for e in self.of(role) if e not in tried))
        except TimeoutError:
            return None
        return self.pick(role, tried)

    async def check_all(self) -> None:
        """One round of checks."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self.all:
                tasks.create_task(self._check(engine))

    async def watch(self) -> None:
        """Checks all of them for ever."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self.all:
                tasks.create_task(self._watch(engine), name=f"watch {engine.url}")

    async def _watch(self, engine: Engine) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.health_interval_s):
                    await engine.check_now.wait()
                    engine.check_now.clear()
            except TimeoutError:
                log.debug("regular check engine=%s", engine.url)
            await self._check(engine)

    async def _check(self, engine: Engine) -> None:
        timeout = aiohttp.ClientTimeout(total=self._config.health_s)
        try:
            async with self._session.get(f"{engine.url}/health", timeout=timeout) as response:
                alive = response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("health check failed engine=%s error=%r", engine.url, error)
            alive = False
        engine.checked(alive, self._config.health_failures_max)
        if engine.up:
            async with self._changed:
                self._changed.notify_all()
