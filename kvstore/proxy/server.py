"""The HTTP face: routes, the token, and the bounds that a request meets before it becomes a job."""

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest

from kvstore.proxy.ask import Ask, Endpoint
from kvstore.proxy.call import EngineLost
from kvstore.proxy.engine import Engine, Role
from kvstore.proxy.job import Job, Means
from kvstore.proxy.relay import answer
from kvstore.proxy.reply import ClientGone, passed_on, refusal

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PASSED_HEADERS = ("X-Request-Id", "traceparent", "tracestate", "X-Session-Id")
PATHS = (*(f"POST {endpoint}" for endpoint in Endpoint), "GET /v1/models", "GET /healthz", "GET /metrics")
NAME_LENGTH_MAX = 128


class Front:
    """Answers clients.

    Args:
        means: what with.
    """

    def __init__(self, means: Means) -> None:
        self._means = means
        self._config = means.config
        self._in_flight = 0

    def application(self) -> web.Application:
        """All routes."""
        application = web.Application(
            middlewares=[self._guard], client_max_size=self._config.body_bytes_max, logger=log
        )
        for endpoint in Endpoint:
            application.router.add_post(endpoint, self._generate)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/metrics", self._metrics)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who may ask, and one line for whatever goes wrong."""
        if request.path != "/healthz" and not self._allowed(request):
            return refusal(
                401, "this proxy asks for its token: Authorization: Bearer <token>", "unauthorized"
            )
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return refusal(
                404, f"{request.path} is not served here; there is {', '.join(PATHS)}", "not_found"
            )
        except web.HTTPRequestEntityTooLarge:
            return refusal(
                413, f"the request is larger than {self._config.body_bytes_max} bytes", "too_large"
            )
        except web.HTTPException as refused:
            return refusal(refused.status, refused.text or refused.reason, "invalid_request_error")

    def _allowed(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        offered = given.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        return not self._config.token or hmac.compare_digest(offered, self._config.token)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Completions and chat, counted and bounded."""
        if self._in_flight >= self._config.in_flight_max:
            self._count(request, "refused")
            return refusal(
                429,
                f"{self._in_flight} requests are under way, the most that this proxy holds",
                "overloaded",
                {"Retry-After": "1"},
            )
        self._in_flight += 1
        self._means.metrics.in_flight.inc()
        outcome, job = "cancelled", None
        try:
            job = await self._read(request)
            if isinstance(job, web.Response):
                outcome = "refused"
                return job
            response = await answer(self._means, request, job)
            outcome = job.outcome
            return response
        except web.HTTPException:
            outcome = "refused"
            raise
        except ClientGone as gone:
            log.info("client gone path=%s: %s", request.path, gone)
            cut_off(request)
            return refusal(499, "the client is gone", "cancelled")
        except Exception:
            outcome = "failed"
            log.exception("request failed because of a bug of the proxy path=%s", request.path)
            if isinstance(job, Job) and job.sending:
                cut_off(request)
            return refusal(500, "this is a bug of the proxy; its log has the details", "internal_error")
        finally:
            self._in_flight -= 1
            self._means.metrics.in_flight.dec()
            self._count(request, outcome)

    def _count(self, request: web.Request, outcome: str) -> None:
        self._means.metrics.requests.labels(request.path, outcome).inc()

    async def _read(self, request: web.Request) -> Job | web.Response:
        try:
            async with asyncio.timeout(self._config.body_s):
                text = await request.read()
        except TimeoutError:
            return refusal(408, f"the request took more than {self._config.body_s:g} s to come", "timeout")
        try:
            body: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            return refusal(400, f"the request is not JSON: {error}", "invalid_request_error")
        if not isinstance(body, dict):
            return refusal(400, "the request is not a JSON object", "invalid_request_error")
        headers = self._headers(request)
        return Job(Ask(Endpoint(request.path), body), headers, headers["X-Request-Id"])

    def _headers(self, request: web.Request) -> dict[str, str]:
        """For engines. Without a token of its own the proxy passes on the client's: it is meant for them."""
        headers = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
        name = headers.get("X-Request-Id", "")
        headers["X-Request-Id"] = name[:NAME_LENGTH_MAX] or secrets.token_hex(16)
        if self._config.engine_token:
            headers["Authorization"] = f"Bearer {self._config.engine_token.decode()}"
        elif not self._config.token and "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        return headers

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """What a decode engine serves."""
        tried: list[Engine] = []
        while engine := await self._means.engines.pick_soon(Role.DECODE, tried):
            tried.append(engine)
            try:
                return passed_on(await self._means.caller.get(engine, "/v1/models", self._headers(request)))
            except EngineLost as lost:
                engine.suspect()
                log.warning("engine failed path=/v1/models: %s", lost)
        return refusal(503, "no decode engine is up", "service_unavailable", {"Retry-After": "5"})

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        """Healthy is who can answer: a decode engine is up."""
        up = {role: sum(engine.up for engine in self._means.engines.of(role)) for role in Role}
        healthy = up[Role.DECODE] > 0
        content = {
            "status": "ok" if healthy else "no decode engine is up",
            "prefill_up": up[Role.PREFILL],
            "decode_up": up[Role.DECODE],
        }
        return web.json_response(content, status=200 if healthy else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text = generate_latest(self._means.metrics.registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def cut_off(request: web.Request) -> None:
    """Ends the connection, so that nobody takes what has been sent for a whole answer."""
    if request.transport is not None:
        request.transport.abort()
