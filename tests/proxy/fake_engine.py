"""An engine of a few lines over real HTTP, which fails as told, and a proxy in front of some of them."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from kvstore.proxy import ProxyConfig
from kvstore.proxy.ask import Endpoint
from kvstore.proxy.run import serving
from tests.proxy.dialect import Body, events, whole
from tests.support import free_port


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Attributes:
        status: it is answered with this and `body`.
        sends: so many bytes of the answer, or so many events if that is given; None: all.
        then: what comes behind them: "close" the connection, "reset" it, "hang", "end" in order, or these bytes.
    """

    status: int = 0
    body: bytes = b""
    sends: int | None = None
    events: int | None = None
    then: str | bytes = "close"


class Asked(NamedTuple):
    """A request as the engine saw it."""

    endpoint: Endpoint
    body: Body
    headers: Mapping[str, str]


@dataclass
class FakeEngine:
    """One engine. `start` and `stop` may be repeated: it is always at the same address."""

    name: str = "a"
    groups: tuple[int, ...] = (1,)
    healthy: bool = True
    port: int = field(default_factory=free_port)
    faults: deque[Fault] = field(default_factory=deque)
    asked: list[Asked] = field(default_factory=list)
    in_flight: int = 0
    cancelled: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        for endpoint in Endpoint:
            application.router.add_post(endpoint, self._generate)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        """As a kill looks from outside."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        endpoint, body = Endpoint(request.path), await request.json()
        self.asked.append(Asked(endpoint, body, request.headers))
        self.in_flight += 1
        try:
            await self.gate.wait()
            return await self._answer(request, endpoint, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, endpoint: Endpoint, body: Body) -> web.StreamResponse:
        fault = self.faults.popleft() if self.faults else Fault(then="end")
        if fault.status:
            return web.Response(status=fault.status, body=fault.body, content_type="application/json")
        response = web.StreamResponse()
        if body.get("stream"):
            response.content_type = "text/event-stream"
            parts = events(endpoint, body, self.name, groups=self.groups)
            data = b"".join(parts[: fault.events])[: fault.sends]
        else:
            response.content_type = "application/json"
            data = web.json_response(whole(endpoint, body, self.name)).body[: fault.sends]  # type: ignore[index,assignment]
        assert request.transport is not None
        if fault.sends == -1:
            request.transport.close()
            return response
        await response.prepare(request)
        await response.write(data)
        if isinstance(fault.then, bytes):
            await response.write(fault.then)
        elif fault.then == "hang":
            await asyncio.Event().wait()
        elif fault.then == "reset":
            request.transport.abort()
        elif fault.then == "close":
            request.transport.close()
        return response


class Front:
    """A running proxy and a client of it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(
        self, endpoint: Endpoint, body: Body, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        async with self.session.post(self.url + endpoint, json=body, headers=headers) as response:
            return response.status, await response.read()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of `kvstore_proxy_<name>` over the samples with these labels."""
        _, text = await self.get("/metrics")
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"kvstore_proxy_{name}" and labels.items() <= sample.labels.items()
        )

    async def metric_is(self, value: float, name: str, **labels: str) -> None:
        """Waits for it: what a client has seen may be counted a moment later."""
        await eventually(lambda: self.metric(name, **labels), value)


async def eventually(ask: Callable[[], Any], value: object) -> None:
    """Waits until the awaited answer is this."""
    answer = None
    try:
        async with asyncio.timeout(10):
            while (answer := await ask()) != value:  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"{answer} did not become {value}") from None


QUICK = ProxyConfig(
    decode=(),
    listen=("127.0.0.1", 0),
    pick_s=0.2,
    health_interval_s=0.05,
    health_s=1.0,
    connect_s=2.0,
    first_token_s=5.0,
    stall_s=5.0,
    prefill_s=5.0,
    request_s=30.0,
)


@asynccontextmanager
async def proxied(
    *, prefill: list[FakeEngine] | None = None, decode: list[FakeEngine], **settings: Any
) -> AsyncIterator[Front]:
    """A proxy before these engines, which are started and stopped with it."""
    async with AsyncExitStack() as stack:
        for engine in (*(prefill or ()), *decode):
            await stack.enter_async_context(engine)
        config = dataclasses.replace(
            QUICK,
            prefill=tuple(e.url for e in prefill or ()),
            decode=tuple(e.url for e in decode),
            **settings,
        )
        (host, port), _ = await stack.enter_async_context(serving(config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Front(f"http://{host}:{port}", session)
