"""The admin endpoint: HTTP for people, probes and Prometheus, on a thread and a loop of its own.

Nothing here touches the store. Answers are rendered from what the control loop last published; the one
question that only the control loop can answer (`/v1/objects`) is put to it with a deadline. So a scrape
costs the control loop nothing, and a stuck control loop can still be seen from here.
"""

import asyncio
import hmac
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import NamedTuple

from aiohttp import web

from kvstore.core import KVStoreError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STOP_S = 5.0


class Route(NamedTuple):
    """One path, GET only. `open`: answered without a token, because probes cannot carry one."""

    path: str
    meaning: str
    answer: Handler
    open: bool = False


class HttpServer:
    """Serves routes on a thread.

    Args:
        listen: numeric host and port; port 0 takes a free one.
        token: the secret that requests must bear, or empty.
        routes: everything that is answered; whatever else is asked gets the list.
    """

    def __init__(self, listen: tuple[str, int], token: bytes, routes: tuple[Route, ...]) -> None:
        self._listen = listen
        self._token = token
        self._routes = {route.path: route for route in routes}
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)
        self._bound: Future[tuple[str, int]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self) -> tuple[str, int]:
        """Listens; the host and port bound.

        Raises:
            KVStoreError: the address cannot be listened on.
        """
        self._thread.start()
        return self._bound.result()

    def stop(self) -> None:
        """Ends the thread and gives the port back."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application(middlewares=[self._guard])
        for route in self._routes.values():
            application.router.add_get(route.path, route.answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, *self._listen).start()
        except OSError as error:
            self._bound.set_exception(
                KVStoreError(f"admin cannot listen on {self._listen}: {error.strerror}")
            )
        else:
            self._bound.set_result(runner.addresses[0][:2])
            await self._stop.wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """One bad request must not end the thread that tells how the node is."""
        try:
            return self._refusal(request) or await handler(request)
        except web.HTTPException as refused:
            return failure(refused.status, refused.text or refused.reason)
        except Exception:
            log.exception("admin request failed path=%s", request.path)
            return failure(500, "this is a bug of the node; its log has the details")

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Unknown paths, missing tokens, wrong methods."""
        resource = request.match_info.route.resource
        route = self._routes.get(resource.canonical if resource else request.path)
        if route is None:
            known = {path: known.meaning for path, known in self._routes.items()}
            return failure(404, f"no such path: {request.path}", routes=known)
        if not route.open and not self._allowed(request):
            return failure(401, "this node asks for its token: Authorization: Bearer <token>")
        if request.method not in ("GET", "HEAD"):
            return failure(405, f"{request.method} is not answered here; ask with GET")
        return None

    def _allowed(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        offered = given.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        return not self._token or hmac.compare_digest(offered, self._token)


def answer(content: object, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.json_response(content, status=status, dumps=lambda value: json.dumps(value, indent=1) + "\n")


def failure(status: int, message: str, **more: object) -> web.Response:
    """A JSON response that says what went wrong."""
    return answer({"error": message, **more}, status)
