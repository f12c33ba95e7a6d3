"""A streamed answer, over as many engines as it takes.

Answers that could be continued are read chunk by chunk through `Answer`. All others are passed on as they come,
event by event; until their first token nothing is sent, so that an engine that dies before it can be replaced.
"""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web

from kvstore.proxy.answer import Answer, Chunk, NotTheSame
from kvstore.proxy.ask import Body
from kvstore.proxy.call import EngineLost, Reply
from kvstore.proxy.engine import Engine
from kvstore.proxy.job import Job, Means
from kvstore.proxy.reply import ClientStream, error_text, refusal
from kvstore.proxy.sse import DONE, Event, write_event

log = logging.getLogger(__name__)

MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError)


class Streaming:
    """One such answer.

    Args:
        means: engines and the like.
        request: of the client.
        job: the same, understood.
    """

    def __init__(self, means: Means, request: web.Request, job: Job) -> None:
        self._means = means
        self._job = job
        self._client = ClientStream(request, means.config.client_stall_s)
        self._answer = Answer(job.ask)
        self._held: list[
            bytes
        ] = []  # events of an answer that is passed on as it comes, before its first token
        self._first_token_sent = False
        self._broke = False  # in the middle, and nothing has come since

    async def run(self) -> web.StreamResponse:
        """The response, sent to its end."""
        try:
            async with asyncio.timeout(self._means.config.request_s):
                return await self._run()
        except TimeoutError:
            if not self._client.began:
                self._job.outcome = "failed"
                return refusal(504, "the request took too long", "timeout")
            return await self._break_off(error_text(504, "the request took too long", "timeout"))

    async def _run(self) -> web.StreamResponse:
        job, means = self._job, self._means
        body = job.ask.decode_body(job.hand_off)
        last: EngineLost | None = None
        while engine := await means.next_decode(job):
            try:
                return await self._leg(engine, body)
            except EngineLost as lost:
                means.note_failure(job, engine, lost)
                last = lost
            except NotTheSame as differs:
                return await self._not_continued("differs", str(differs))
            if not self._client.began:
                self._answer, self._held = Answer(job.ask), []
                continue
            if self._answer.finished:
                return await self._finish()
            self._broke = True
            if self._answer.obstacle:
                return await self._not_continued("not_possible", self._answer.obstacle, last)
            body = self._answer.resume(job.hand_off)
        if self._client.began:
            return await self._not_continued("no_engine", "no other engine is up", last)
        return means.give_up(job, last)

    async def _leg(self, engine: Engine, body: Body) -> web.StreamResponse:
        """What one engine contributes, up to the end of the answer.

        Raises:
            EngineLost: it did not come to the end.
            NotTheSame: it does not continue what was sent.
        """
        job = self._job
        async with self._means.caller.stream(engine, job.ask.endpoint, body, job.headers) as got:
            if isinstance(got, Reply):
                if self._client.began:
                    raise NotTheSame(f"the engine refuses to go on: {got.status} {got.body[:200]!r}")
                return self._means.pass_on(job, got)
            while True:
                for event in await got.read():
                    if event.data == DONE:
                        return await self._finish()
                    chunk = _read_chunk(engine, event)
                    if chunk is not None:
                        await self._take(engine, event, chunk)

    async def _take(self, engine: Engine, event: Event, chunk: Chunk) -> None:
        """Sends what the client is to see of it."""
        if "error" in chunk:
            self._job.outcome = "engine_error"
            await self._send(event.raw)
        elif self._job.ask.obstacle:
            self._held.append(event.raw)
            if self._client.began or has_token(chunk):
                await self._send(b"".join(self._held), token=True)
                self._held = []
        else:
            tokens = has_token(chunk)
            try:
                shown = self._answer.take(chunk)
            except MALFORMED as error:
                raise EngineLost(engine, "garbled", f"sends what is no answer: {error!r}") from error
            if shown is not None:
                await self._send(write_event(msgspec.json.encode(shown)), token=tokens)

    async def _send(self, data: bytes, *, token: bool = False) -> None:
        if token and not self._first_token_sent:
            self._first_token_sent = True
            self._means.metrics.first_token_seconds.observe(self._job.age_s)
        if token and self._broke:
            self._broke = False
            self._count_hand_over("continued")
        if token:
            del self._job.tried[:-1]  # what failed before may have come back
        self._job.sending = True
        await self._client.send(data)

    async def _finish(self) -> web.StreamResponse:
        """The end of the answer, with what a dead engine may have left out."""
        if self._held:
            await self._client.send(b"".join(self._held))
        for chunk in self._answer.ending() if self._answer.finished else ():
            await self._client.send(write_event(msgspec.json.encode(chunk)))
        await self._client.end()
        return self._client.response

    async def _not_continued(
        self, outcome: str, why: str, last: EngineLost | None = None
    ) -> web.StreamResponse:
        self._count_hand_over(outcome, why)
        if last is not None and last.reply is not None and "error" in last.reply.json():
            return await self._break_off(last.reply.body)
        cause = f"{last}; " if last else ""
        message = f"{cause}the answer cannot be continued elsewhere: {why}"
        return await self._break_off(error_text(502, message, "engine_lost"))

    async def _break_off(self, error: bytes) -> web.StreamResponse:
        self._job.outcome = "broken_off"
        await self._client.break_off(error.replace(b"\n", b" "))
        return self._client.response

    def _count_hand_over(self, outcome: str, why: str = "") -> None:
        self._means.metrics.hand_overs.labels(outcome).inc()
        log.warning(
            "stream broke request=%s outcome=%s tokens=%d%s",
            self._job.name,
            outcome,
            self._answer.tokens,
            f": {why}" if why else "",
        )


def _read_chunk(engine: Engine, event: Event) -> Chunk | None:
    """The event's content; None for a comment.

    Raises:
        EngineLost: it says that the engine is in trouble, or says nothing intelligible.
    """
    if not event.data:
        return None
    try:
        chunk: Any = msgspec.json.decode(event.data)
    except msgspec.DecodeError as error:
        raise EngineLost(engine, "garbled", f"sends no JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise EngineLost(engine, "garbled", "sends JSON that is no object")
    error_said = chunk.get("error")
    if isinstance(error_said, dict) and _is_trouble(error_said.get("code")):
        reply = Reply(500, "application/json", event.data)
        raise EngineLost(engine, "died", f"says {error_said.get('message')}", reply)
    if any(choice.get("finish_reason") == "abort" for choice in chunk.get("choices") or []):
        raise EngineLost(engine, "died", "aborted the request of its own accord")
    return chunk


def _is_trouble(code: object) -> bool:
    """Whether it is the engine, and not the request, that is at fault."""
    return not isinstance(code, int) or code >= 500


def has_token(chunk: Chunk) -> bool:
    """Whether it is more than the opening of a chat's answer."""
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta")
        if delta is None or choice.get("finish_reason") is not None or "role" not in delta:
            return True
        if any(value for key, value in delta.items() if key != "role"):
            return True
    return False
