"""What the admin endpoint answers."""

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvstore.admin.http import HttpServer, Route, answer, failure
from kvstore.admin.metrics import registry_of
from kvstore.admin.plain import plain
from kvstore.admin.view import ObjectsPage, View
from kvstore.core import limits
from kvstore.store import ReportLog

HEALTHY_LAG_S = 5.0
CONTROL_DEADLINE_S = 2.0
OBJECTS_PER_PAGE_MAX = 1_000

AskObjects = Callable[[int, int], Coroutine[Any, Any, ObjectsPage]]
"""(at most so many, cursor) to a page; runs on the control loop."""
AskReports = Callable[[], Coroutine[Any, Any, ReportLog]]
"""To what is remembered of reports; runs on the control loop."""
T = TypeVar("T")


class AdminServer:
    """HTTP for people, probes and Prometheus, on a thread of its own.

    Args:
        listen: numeric host and port.
        token: what requests other than probes must bear; empty: nothing.
        first: the view to show until `publish` brings another.
        objects: lists objects, on the control loop.
        reports: what engines have reported, on the control loop.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        token: bytes,
        first: View,
        objects: AskObjects,
        reports: AskReports,
    ) -> None:
        self._view = first
        self._objects = objects
        self._reports = reports
        self._control_loop: asyncio.AbstractEventLoop | None = None
        self._ready = False
        self._registry = registry_of(lambda: self._view)
        self.routes = (
            Route("/healthz", "the process lives and its control loop turns", self._healthz, open=True),
            Route("/readyz", "the node serves engines", self._readyz, open=True),
            Route("/metrics", "counts and gauges for Prometheus", self._metrics),
            Route("/v1/stats", "the same and more, as JSON", self._stats),
            Route("/v1/objects", "what is stored, in pages: ?limit=100&cursor=0", self._list),
            Route("/v1/requests/{id}", "what engines have reported of one of their requests", self._request),
        )
        self._http = HttpServer(listen, token, self.routes)

    def start(self) -> tuple[str, int]:
        """Listens; the host and port bound. To be called on the control loop.

        Raises:
            KVStoreError: the address cannot be listened on.
        """
        self._control_loop = asyncio.get_running_loop()
        return self._http.start()

    def publish(self, view: View) -> None:
        """What is shown from now on: frozen, so that the other thread reads it without a lock."""
        self._view = view

    def ready(self, now: bool) -> None:
        """Whether the node serves: not before it has said so, and not any more when it is about to stop."""
        self._ready = now

    def stop(self) -> None:
        """Gives the port back."""
        self._http.stop()

    async def _healthz(self, request: web.Request) -> web.Response:
        age_s = monotonic() - self._view.at_s
        if age_s > HEALTHY_LAG_S:
            return failure(503, f"the control loop has been stuck for {age_s:.0f} s")
        return answer({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        if not self._ready:
            return failure(503, "the node is starting or stopping")
        return await self._healthz(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _stats(self, request: web.Request) -> web.Response:
        return answer(plain(self._view))

    async def _list(self, request: web.Request) -> web.Response:
        try:
            limit = int(request.query.get("limit", "100"))
            cursor = int(request.query.get("cursor", "0"))
        except ValueError:
            return failure(400, "limit and cursor are numbers")
        if unknown := set(request.query) - {"limit", "cursor"}:
            return failure(400, f"unknown parameter {min(unknown)!r}; known are limit, cursor")
        if not 1 <= limit <= OBJECTS_PER_PAGE_MAX or cursor < 0:
            return failure(400, f"limit is from 1 to {OBJECTS_PER_PAGE_MAX}, cursor from 0")
        return answer(plain(await self._of_control(self._objects(limit, cursor))))

    async def _request(self, request: web.Request) -> web.Response:
        """The looking through is done here, on this thread."""
        name = request.match_info["id"]
        found = (await self._of_control(self._reports())).of(name)
        if not found:
            kept = limits.REPORTS_REMEMBERED_MAX
            return failure(
                404, f"no engine has reported a request {name!r} here, of the last {kept} there were"
            )
        return answer({"reports": plain(found)})

    async def _of_control(self, asked: Coroutine[Any, Any, T]) -> T:
        """What only the control loop can tell.

        Raises:
            web.HTTPServiceUnavailable: it did not, in time.
        """
        assert self._control_loop is not None, "asked before it was started"
        told = asyncio.run_coroutine_threadsafe(asked, self._control_loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(told), CONTROL_DEADLINE_S)
        except TimeoutError:
            text = f"the control loop did not answer within {CONTROL_DEADLINE_S:.0f} s"
            raise web.HTTPServiceUnavailable(text=text) from None
