"""The life of a request: prefill, hand-off, decode, and another engine where one fails.

1. A prefill engine computes the prompt and one token; its `kv_transfer_params` go into the request for decode.
   Whatever goes wrong here costs the hand-off and never the request: decode alone computes the prompt.
2. A decode engine answers. Until the client has been sent something, an engine that fails is replaced by
   another, at most `attempts_max` in all; what engines say about the request itself (4xx) is passed on at once.
3. A stream that breaks in the middle goes on at another engine if that can be done exactly (`streaming`).
"""

import logging

from aiohttp import web

from kvstore.proxy.ask import Body
from kvstore.proxy.call import EngineLost
from kvstore.proxy.engine import Engine, Role
from kvstore.proxy.job import Job, Means
from kvstore.proxy.streaming import Streaming

log = logging.getLogger(__name__)


async def answer(means: Means, request: web.Request, job: Job) -> web.StreamResponse:
    """The response, sent already if it is a stream.

    Raises:
        ClientGone: the client does not take it.
    """
    job.hand_off = await _prefill(means, job)
    if job.ask.streams:
        return await Streaming(means, request, job).run()
    return await _whole(means, job)


async def _prefill(means: Means, job: Job) -> Body | None:
    """The hand-off; None when decode has to do without."""
    if not means.engines.of(Role.PREFILL):
        return None
    hand_off, reason = await _ask_prefills(means, job)
    if hand_off is not None:
        means.metrics.prefill_seconds.observe(job.age_s)
        return hand_off
    means.metrics.fallbacks.labels(reason).inc()
    log.info("decode without a hand-off request=%s reason=%s", job.name, reason)
    return None


async def _ask_prefills(means: Means, job: Job) -> tuple[Body | None, str]:
    """(the hand-off, or why there is none)."""
    tried: list[Engine] = []
    body = job.ask.prefill_body()
    while len(tried) < means.config.attempts_max and (engine := means.engines.pick(Role.PREFILL, tried)):
        tried.append(engine)
        try:
            reply = await means.caller.whole(
                engine, job.ask.endpoint, body, job.headers, means.config.prefill_s
            )
        except EngineLost as lost:
            means.note_failure(job, engine, lost)
            continue
        hand_off = reply.json().get("kv_transfer_params")
        if reply.status != 200:
            return None, "prefill_refused"
        return (hand_off, "") if isinstance(hand_off, dict) and hand_off else (None, "no_hand_off")
    return None, "prefill_failed" if tried else "no_prefill"


async def _whole(means: Means, job: Job) -> web.Response:
    last: EngineLost | None = None
    body = job.ask.decode_body(job.hand_off)
    while engine := await means.next_decode(job):
        left_s = max(0.0, means.config.request_s - job.age_s)
        try:
            reply = await means.caller.whole(engine, job.ask.endpoint, body, job.headers, left_s)
        except EngineLost as lost:
            means.note_failure(job, engine, lost)
            last = lost
            continue
        return means.pass_on(job, reply)
    return means.give_up(job, last)
