"""One request under way, and what all requests are answered with."""

import logging
import time
from dataclasses import dataclass, field

from aiohttp import web

from kvstore.proxy.ask import Ask, Body
from kvstore.proxy.call import Caller, EngineLost, Reply
from kvstore.proxy.config import ProxyConfig
from kvstore.proxy.engine import Engine, Engines, Role
from kvstore.proxy.metrics import ProxyMetrics
from kvstore.proxy.reply import passed_on, refusal

log = logging.getLogger(__name__)


@dataclass
class Job:
    """One request.

    Attributes:
        tried: decode engines asked since the answer last made progress, the present one included.
        sending: a stream has begun, so no other response can be sent.
    """

    ask: Ask
    headers: dict[str, str]
    name: str
    began_at: float = field(default_factory=time.monotonic)
    hand_off: Body | None = None
    tried: list[Engine] = field(default_factory=list)
    outcome: str = "ok"
    sending: bool = False

    @property
    def age_s(self) -> float:
        """Since it came."""
        return time.monotonic() - self.began_at


@dataclass(frozen=True)
class Means:
    """What requests are answered with."""

    config: ProxyConfig
    engines: Engines
    caller: Caller
    metrics: ProxyMetrics

    async def next_decode(self, job: Job) -> Engine | None:
        """A decode engine that has not failed this request; None when it is time to give up."""
        if len(job.tried) >= self.config.attempts_max:
            return None
        engine = await self.engines.pick_soon(Role.DECODE, job.tried)
        if engine is not None:
            job.tried.append(engine)
        return engine

    def note_failure(self, job: Job, engine: Engine, lost: EngineLost) -> None:
        """An engine has failed this request."""
        engine.suspect()
        self.metrics.failures.labels(engine.role, lost.reason).inc()
        log.warning("engine failed request=%s: %s", job.name, lost)

    def pass_on(self, job: Job, reply: Reply) -> web.Response:
        """What an engine said about the request."""
        job.outcome = "ok" if reply.status < 400 else "engine_error"
        return passed_on(reply)

    def give_up(self, job: Job, last: EngineLost | None) -> web.Response:
        """Nobody has answered: the last engine's own words, or ours."""
        job.outcome = "failed"
        if last is None:
            return refusal(
                503,
                "no decode engine is up; they are asked again every few seconds",
                "service_unavailable",
                {"Retry-After": "5"},
            )
        if last.reply is not None:
            return passed_on(last.reply)
        return refusal(504 if last.reason == "timeout" else 502, str(last), "engine_lost")
