"""What a client is sent: whole replies, and a stream that is begun only when there is something to send."""

import asyncio
import json
from collections.abc import Mapping

from aiohttp import web

from kvstore.proxy.call import Reply
from kvstore.proxy.sse import DONE, write_event


class ClientGone(Exception):
    """Nobody takes the answer any more."""


def error_text(status: int, message: str, kind: str) -> bytes:
    """An error in the words of OpenAI's API."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def refusal(status: int, message: str, kind: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error of our own."""
    return web.Response(
        status=status,
        body=error_text(status, message, kind),
        content_type="application/json",
        headers=headers,
    )


def passed_on(reply: Reply) -> web.Response:
    """What an engine said, as it is."""
    return web.Response(status=reply.status, body=reply.body, content_type=reply.content_type)


class ClientStream:
    """The client's end of a streamed answer.

    Args:
        request: of the client.
        stall_s: how long it may not read.
    """

    def __init__(self, request: web.Request, stall_s: float) -> None:
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        self.began = False
        self._request = request
        self._stall_s = stall_s

    async def send(self, data: bytes) -> None:
        """Sends whole events; returns when the client's side has room for more.

        Raises:
            ClientGone: it has closed, or has not read for too long.
        """
        try:
            async with asyncio.timeout(self._stall_s):
                if not self.began:
                    self.began = True
                    await self.response.prepare(self._request)
                await self.response.write(data)
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone(str(error) or "it does not read") from error

    async def end(self) -> None:
        """The orderly end of all streams."""
        await self.send(write_event(DONE))

    async def break_off(self, data: bytes) -> None:
        """An error event; then the end, as vLLM does it."""
        await self.send(write_event(data))
        await self.end()
