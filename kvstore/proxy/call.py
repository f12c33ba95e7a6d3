"""Requests to an engine. The one place where errors of HTTP and of the network become `EngineLost`."""

import io
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import aiohttp
import msgspec

from kvstore.proxy.ask import Body
from kvstore.proxy.config import EVENT_BYTES_MAX, READ_BYTES, REPLY_BYTES_MAX, ProxyConfig
from kvstore.proxy.engine import Engine
from kvstore.proxy.sse import Event, EventSplitter, EventTooLarge

RETRIED = (500, 502, 503, 504)  # what an engine says when it, and not the request, is in trouble


class Reply(NamedTuple):
    """An engine's whole answer."""

    status: int
    content_type: str
    body: bytes

    def json(self) -> Body:
        """Its object; empty if it is none."""
        try:
            content = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        return content if isinstance(content, dict) else {}


class EngineLost(Exception):
    """This engine did not answer, or broke off: another may be asked.

    `reason` is one word for metrics. `reply` is what it said, if it said that it is in trouble.
    """

    def __init__(self, engine: Engine, reason: str, what: str, reply: Reply | None = None) -> None:
        super().__init__(f"engine {engine.url}: {what}")
        self.reason = reason
        self.reply = reply


@contextmanager
def lost_by_network(engine: Engine, doing: str) -> Iterator[None]:
    """Whatever goes wrong on the way, in our words."""
    try:
        yield
    except TimeoutError as error:
        raise EngineLost(engine, "timeout", f"did not answer in time ({doing})") from error
    except aiohttp.ClientConnectorError as error:
        raise EngineLost(engine, "connect", f"cannot be reached: {error.os_error.strerror}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineLost(
            engine, "died", f"broke off while {doing}: {str(error) or type(error).__name__}"
        ) from error
    except EventTooLarge as error:
        raise EngineLost(engine, "garbled", f"sends an event of {error}") from error


class Caller:
    """Makes requests.

    Args:
        config: deadlines.
        session: a connection for each request, so that closing it is what cancels the request at the engine.
    """

    def __init__(self, config: ProxyConfig, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._session = session

    async def get(self, engine: Engine, path: str, headers: Mapping[str, str]) -> Reply:
        """The answer to a plain question.

        Raises:
            EngineLost: there is none.
        """
        with engine.busy(), lost_by_network(engine, "answering"):
            async with (
                engine.patience(self._config.health_s),
                self._session.get(engine.url + path, headers=headers) as response,
            ):
                return await _read(engine, response)

    async def whole(
        self, engine: Engine, path: str, body: Body, headers: Mapping[str, str], seconds: float
    ) -> Reply:
        """The answer to a request that is not streamed.

        Raises:
            EngineLost: there is none within `seconds`, or the engine is in trouble.
        """
        with engine.busy(), lost_by_network(engine, "answering"):
            async with engine.patience(seconds), self._post(engine, path, body, headers) as response:
                reply = await _read(engine, response)
        if reply.status in RETRIED:
            raise EngineLost(engine, "status", f"answered {reply.status}", reply)
        if any(_aborted(choice) for choice in reply.json().get("choices") or []):
            raise EngineLost(engine, "died", "aborted the request of its own accord")
        return reply

    @asynccontextmanager
    async def stream(
        self, engine: Engine, path: str, body: Body, headers: Mapping[str, str]
    ) -> AsyncIterator["Reply | Stream"]:
        """A stream under way, closed at the end of the block; or what the engine says instead.

        Raises:
            EngineLost: neither came.
        """
        with engine.busy():
            with lost_by_network(engine, "accepting"):
                async with engine.patience(self._config.first_token_s):
                    response = await self._post(engine, path, body, headers)
            try:
                if response.status == 200 and response.content_type == "text/event-stream":
                    yield Stream(self._config, engine, response)
                    return
                with lost_by_network(engine, "answering"):
                    async with engine.patience(self._config.stall_s):
                        reply = await _read(engine, response)
                if reply.status in RETRIED:
                    raise EngineLost(engine, "status", f"answered {reply.status}", reply)
                yield reply
            finally:
                response.close()

    def _post(
        self, engine: Engine, path: str, body: Body, headers: Mapping[str, str]
    ) -> "aiohttp.client._RequestContextManager":
        data = io.BytesIO(json.dumps(body, separators=(",", ":")).encode())
        return self._session.post(
            engine.url + path, data=data, headers={**headers, "Content-Type": "application/json"}
        )


class Stream:
    """Events of an answer."""

    def __init__(self, config: ProxyConfig, engine: Engine, response: aiohttp.ClientResponse) -> None:
        self._config = config
        self._engine = engine
        self._response = response
        self._splitter = EventSplitter(EVENT_BYTES_MAX)
        self._began = False

    async def read(self) -> list[Event]:
        """The next events, at least one. After the first, silence is a stall.

        Raises:
            EngineLost: it broke off, inside an event or without `[DONE]`, or is silent for too long.
        """
        seconds = self._config.stall_s if self._began else self._config.first_token_s
        while True:
            with lost_by_network(self._engine, "streaming"):
                async with self._engine.patience(seconds):
                    data = await self._response.content.read(READ_BYTES)
                events = self._splitter.feed(data)
            if events:
                self._began = True
                return events
            if not data:
                raise EngineLost(self._engine, "died", "ended its stream without [DONE]")


async def _read(engine: Engine, response: aiohttp.ClientResponse) -> Reply:
    parts, size = [], 0
    async for part in response.content.iter_chunked(READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > REPLY_BYTES_MAX:
            raise EngineLost(engine, "garbled", f"answers with more than {REPLY_BYTES_MAX} bytes")
    return Reply(response.status, response.content_type, b"".join(parts))


def _aborted(choice: object) -> bool:
    """An engine that is told to stop ends what it has begun with this reason."""
    return isinstance(choice, dict) and choice.get("finish_reason") == "abort"
