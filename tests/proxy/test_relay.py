"""Requests through a real proxy to engines that fail as told.

Mutants that these tests kill: no max_tokens=1 for prefill; the hand-off not carried; always the first engine;
no retry, or one on the same engine; a retry after the client has seen a token; an error of the request retried;
an engine's error replaced by one of ours; a cut event sent on; no error event behind a broken stream; engines not
told when the client goes.
"""

import asyncio
import json
import random
from collections import deque
from itertools import accumulate
from typing import Any

import aiohttp
import pytest

from kvstore.proxy.answer import Answer
from kvstore.proxy.ask import Ask, Endpoint
from kvstore.proxy.metrics import OUTCOMES
from tests.proxy.dialect import HAND_OFF, SCRIPT, events, prompt_ids, read, text_of, token_ids_of, whole
from tests.proxy.fake_engine import FakeEngine, Fault, eventually, proxied
from tests.support import wait_until_async

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Tell: ö", "max_tokens": 40, "temperature": 0}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Tell"}], "max_tokens": 40}
BODIES = {Endpoint.COMPLETIONS: COMPLETION, Endpoint.CHAT: CHAT}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
both = pytest.mark.parametrize("endpoint", list(Endpoint), ids=["completions", "chat"])


def whole_stream(endpoint: Endpoint, body: dict[str, Any], name: str = "a") -> bytes:
    return b"".join(events(endpoint, body, name))


# --- prefill and the hand-off ---


@both
async def test_prefill_computes_and_decode_gets_the_hand_off(endpoint) -> None:
    prefill, decode = FakeEngine(), FakeEngine()
    body = BODIES[endpoint] | STREAM | {"seed": 3, "stop": ["none such"], "kv_transfer_params": {"ttl_s": 5}}
    async with proxied(prefill=[prefill], decode=[decode]) as front:
        status, answer = await front.post(endpoint, body, {"X-Request-Id": "req-7"})
        assert (status, answer) == (200, whole_stream(endpoint, body))
        assert await front.metric("prefill_seconds_count") == 1
        assert await front.metric("fallbacks_total") == 0
    (first,), (second,) = prefill.asked, decode.asked
    assert (first.endpoint, first.body) == (endpoint, Ask(endpoint, body).prefill_body())
    assert first.body["max_tokens"] == 1
    assert second.body == body | {
        "kv_transfer_params": {"ttl_s": 5, "live": 0} | HAND_OFF,
        "return_token_ids": True,
    }
    assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"] == "req-7"


@both
async def test_an_answer_that_is_not_streamed(endpoint) -> None:
    prefill, decode = FakeEngine(), FakeEngine("d")
    body = BODIES[endpoint] | {"n": 2, "logprobs": True}
    async with proxied(prefill=[prefill], decode=[decode]) as front:
        status, answer = await front.post(endpoint, body)
    assert (status, json.loads(answer)) == (200, whole(endpoint, body, "d"))
    assert decode.asked[0].body == body | {"kv_transfer_params": HAND_OFF}


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ([Fault(sends=-1), Fault(sends=-1)], "prefill_failed"),
        ([Fault(sends=20), Fault(status=503, body=b"{}")], "prefill_failed"),
        ([Fault(then="hang"), Fault(then="hang")], "prefill_failed"),
        ([Fault(status=400, body=b'{"error": {}}')], "prefill_refused"),
        ([Fault(sends=0, then=b"{}")], "no_hand_off"),
    ],
    ids=["died", "broke off", "hangs", "refused", "no hand-off"],
)
async def test_decode_alone_when_prefill_fails(faults, reason) -> None:
    prefills, decode = [FakeEngine(), FakeEngine()], FakeEngine()
    for number, fault in enumerate(faults):
        prefills[number].faults.append(fault)
    async with proxied(
        prefill=prefills, decode=[decode], prefill_s=0.3 if faults[0].then == "hang" else 5.0
    ) as front:
        async with asyncio.timeout(15):  # two prefills that hang cost two deadlines of theirs, no more
            status, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        assert (status, text_of(read(answer))) == (200, SCRIPT.encode()[:40].decode())
        assert await front.metric("fallbacks_total", reason=reason) == 1
    assert [len(prefill.asked) for prefill in prefills] == [1, len(faults) - 1]
    assert decode.asked[0].body["kv_transfer_params"] == {"live": 0}


async def test_another_prefill_when_one_dies() -> None:
    prefills, decode = [FakeEngine(), FakeEngine()], FakeEngine()
    prefills[0].faults.append(Fault(sends=-1))
    async with proxied(prefill=prefills, decode=[decode]) as front:
        await front.post(Endpoint.COMPLETIONS, COMPLETION)
        assert await front.metric("engine_failures_total", role="prefill", reason="died") == 1
    assert decode.asked[0].body["kv_transfer_params"] == HAND_OFF


async def test_no_prefill_is_up() -> None:
    prefill, decode = FakeEngine(healthy=False), FakeEngine()
    async with proxied(prefill=[prefill], decode=[decode]) as front:
        status, _ = await front.post(Endpoint.COMPLETIONS, COMPLETION)
        assert status == 200
        assert await front.metric("fallbacks_total", reason="no_prefill") == 1
        prefill.healthy = True
        await front.metric_is(1, "engine_up", role="prefill")
        await front.post(Endpoint.COMPLETIONS, COMPLETION)
    assert [("kv_transfer_params" in asked.body) for asked in decode.asked] == [False, True]


# --- choosing ---


async def test_the_one_with_the_fewest_in_flight_is_taken_and_else_they_take_turns() -> None:
    decodes = [FakeEngine(name) for name in "abc"]
    async with proxied(decode=decodes) as front:
        for _ in range(6):
            await front.post(Endpoint.COMPLETIONS, COMPLETION)
        assert [len(decode.asked) for decode in decodes] == [2, 2, 2]
        decodes[1].gate.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(front.post(Endpoint.COMPLETIONS, COMPLETION))
            await wait_until_async(lambda: decodes[1].in_flight == 1)
            for _ in range(4):
                await front.post(Endpoint.COMPLETIONS, COMPLETION)
            assert [len(decode.asked) for decode in decodes] == [5, 3, 5]
            decodes[1].gate.set()
        await eventually(lambda: front.metric("engine_in_flight"), 0)


# --- an engine dies before its first token ---

BEFORE_FIRST_TOKEN = {
    "no answer": Fault(sends=-1),
    "no event": Fault(sends=0),
    "in the first event": Fault(sends=100),
    "reset": Fault(sends=0, then="reset"),
    "ends without a word": Fault(sends=0, then="end"),
    "503": Fault(status=503, body=b"{}"),
    "500": Fault(status=500, body=b"{}"),
    "error event": Fault(
        sends=0, then=b'data: {"error": {"message": "dead", "code": 500}}\n\ndata: [DONE]\n\n'
    ),
    "aborted": Fault(
        sends=0,
        then=b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n',
    ),
    "no JSON": Fault(sends=0, then=b"data: {\n\n"),
}


@pytest.mark.parametrize("how", BEFORE_FIRST_TOKEN)
@pytest.mark.parametrize("more", [{}, {"n": 1, "logprobs": 0}], ids=["continued", "passed through"])
@both
async def test_another_decode_when_one_dies_before_the_first_token(endpoint, more, how) -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(BEFORE_FIRST_TOKEN[how])
    body = BODIES[endpoint] | STREAM | more
    async with proxied(decode=[first, second]) as front:
        status, answer = await front.post(endpoint, body)
        assert (status, answer) == (200, whole_stream(endpoint, body, "b"))
        assert await front.metric("engine_failures_total", role="decode") == 1
        assert await front.metric("hand_overs_total") == 0
    assert len(first.asked) == len(second.asked) == 1


async def test_another_decode_when_one_is_silent() -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(Fault(sends=0, then="hang"))
    async with proxied(decode=[first, second], first_token_s=2.5) as front:
        _, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        assert answer == whole_stream(Endpoint.COMPLETIONS, COMPLETION | STREAM, "b")
        assert await front.metric("engine_failures_total", reason="timeout") == 1


@pytest.mark.parametrize("more", [{}, {"n": 1, "logprobs": 0}], ids=["continued", "passed through"])
async def test_the_opening_of_a_chat_is_no_token(more) -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(Fault(events=1))
    body = CHAT | STREAM | more
    async with proxied(decode=[first, second]) as front:
        _, answer = await front.post(Endpoint.CHAT, body)
    name = "b" if more else "a"  # the opening of the first may have been sent, with its name
    assert answer == whole_stream(Endpoint.CHAT, body, name)


@pytest.mark.parametrize("how", ["no answer", "in the first event", "503"])
async def test_an_answer_that_is_not_streamed_is_asked_for_again(how) -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(BEFORE_FIRST_TOKEN[how])
    async with proxied(decode=[first, second]) as front:
        status, answer = await front.post(Endpoint.CHAT, CHAT)
    assert (status, json.loads(answer)) == (200, whole(Endpoint.CHAT, CHAT, "b"))


async def test_the_number_of_attempts_is_bounded_and_no_engine_is_asked_twice() -> None:
    decodes = [FakeEngine() for _ in range(5)]
    for decode in decodes:
        decode.faults.extend([Fault(sends=-1)] * 5)
    async with proxied(decode=decodes) as front:
        for stream in (True, False):
            status, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | {"stream": stream})
            assert status == 502
            assert "broke off" in json.loads(answer)["error"]["message"]
        assert await front.metric("requests_total", outcome="failed") == 2
    assert sum(len(decode.asked) for decode in decodes) == 6
    one = FakeEngine()
    one.faults.append(Fault(sends=-1))
    async with proxied(decode=[one]) as front:
        assert (await front.post(Endpoint.COMPLETIONS, COMPLETION))[0] == 502
    assert len(one.asked) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_words_of_the_last_engine_are_passed_on(stream) -> None:
    decodes = [FakeEngine(), FakeEngine()]
    for decode in decodes:
        decode.faults.append(Fault(status=503, body=b'{"error": {"message": "overloaded"}}'))
    async with proxied(decode=decodes) as front:
        answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | {"stream": stream})
    assert answer == (503, b'{"error": {"message": "overloaded"}}')


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501])
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_of_the_request_are_passed_on_and_not_retried(status, stream) -> None:
    decodes = [FakeEngine(), FakeEngine()]
    for decode in decodes:
        decode.faults.append(Fault(status=status, body=b'{"error": {"message": "no"}}'))
    async with proxied(decode=decodes) as front:
        answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | {"stream": stream})
        assert answer == (status, b'{"error": {"message": "no"}}')
        assert await front.metric("engine_up", role="decode") == 2
        assert await front.metric("requests_total", outcome="engine_error") == 1
    assert sum(len(decode.asked) for decode in decodes) == 1


async def test_an_error_event_about_the_request_is_passed_on() -> None:
    decode = FakeEngine()
    words = b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
    decode.faults.append(Fault(events=3, then=words))
    async with proxied(decode=[decode, FakeEngine()]) as front:
        _, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
    assert answer.endswith(words)


# --- an engine dies in the middle ---


def cuts(endpoint: Endpoint, body: dict[str, Any]) -> list[int]:
    """Around the ends of all events, and inside each."""
    parts = events(endpoint, Ask(endpoint, body).decode_body(None))
    ends = list(accumulate(map(len, parts)))
    return sorted({at for end in ends[:-1] for at in (end - 1, end, end + 1, end + 37) if at < ends[-1]})


@both
async def test_a_stream_goes_on_elsewhere_as_if_nothing_had_happened(endpoint) -> None:
    """Cut at every event's end, a byte before and behind it, and inside it."""
    faults: deque[Fault] = deque()
    decodes = [FakeEngine("a", faults=faults), FakeEngine("a", faults=faults)]
    body = BODIES[endpoint] | STREAM | {"max_tokens": 12, "return_token_ids": True}
    expected = read(whole_stream(endpoint, body))
    tried = cuts(endpoint, body)
    async with proxied(decode=decodes) as front:
        for cut in tried:
            await front.metric_is(2, "engine_up", role="decode")
            faults.append(Fault(sends=cut))
            _, answer = await front.post(endpoint, body)
            chunks = read(answer)
            assert (text_of(chunks), token_ids_of(chunks)) == (text_of(expected), token_ids_of(expected))
            assert chunks[-1] == expected[-1]
        assert await front.metric("engine_failures_total", reason="died") == len(tried)
        assert await front.metric("hand_overs_total", outcome="continued") > 30
        assert await front.metric("requests_total", outcome="ok") == len(tried)


@both
async def test_sixty_streams_whose_engines_die_at_random(endpoint) -> None:
    """Each engine breaks every answer but the third off somewhere; what clients read is what one engine would say."""
    rng = random.Random(5)
    decodes = [FakeEngine(name, groups=(1, rng.randint(1, 3))) for name in "abcd"]
    body = BODIES[endpoint] | STREAM
    size = len(whole_stream(endpoint, body | {"return_token_ids": True}))
    for decode in decodes:
        for number in range(60):
            fault = Fault(sends=rng.randrange(size), then=rng.choice(["close", "end", "reset"]))
            decode.faults.append(Fault(then="end") if number % 3 == 2 else fault)
    expected = read(whole_stream(endpoint, body))
    async with proxied(prefill=[FakeEngine()], decode=decodes, attempts_max=4, pick_s=3.0) as front:

        async def ask() -> str:
            status, answer = await front.post(endpoint, body)
            if status != 200:
                return f"{status}"
            chunks = read(answer)
            if "error" in chunks[-1]:
                return "broken off"
            assert text_of(chunks) == text_of(expected)
            assert chunks[-1]["usage"] == expected[-1]["usage"]
            assert len({chunk["id"] for chunk in chunks}) == 1
            return "ok"

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask()) for _ in range(60)]
        outcomes = [task.result() for task in asked]
        assert outcomes.count("ok") >= 50
        assert await front.metric("hand_overs_total", outcome="continued") >= 20
        assert await front.metric("hand_overs_total", outcome="differs") == 0
        await front.metric_is(0, "in_flight")
        await front.metric_is(0, "engine_in_flight")
    assert sum(decode.in_flight for decode in decodes) == 0


async def test_the_continuation_goes_without_the_hand_off_of_the_shorter_prompt() -> None:
    """It names the last key of a prompt that this is not."""
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(Fault(events=6))
    async with proxied(prefill=[FakeEngine()], decode=[first, second]) as front:
        await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        assert await front.metric("hand_overs_total", outcome="continued") == 1
    (asked,) = second.asked
    assert asked.body["prompt"] == prompt_ids(Endpoint.COMPLETIONS, COMPLETION) + list(SCRIPT.encode()[:6])
    assert asked.body["kv_transfer_params"] == {"live": 6}


async def test_several_deaths_in_one_answer() -> None:
    """Every engine that makes progress earns the answer a new set of attempts."""
    first, second = FakeEngine("a"), FakeEngine("b")
    for number in range(4):
        first.faults.append(Fault(events=4 + number))
        second.faults.append(Fault(events=5))
    async with proxied(decode=[first, second], attempts_max=2, pick_s=5.0) as front:
        _, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM | {"max_tokens": 60})
        assert text_of(read(answer)) == SCRIPT.encode()[:60].decode()
        assert await front.metric("hand_overs_total", outcome="continued") == 8
        assert await front.metric("requests_total", outcome="ok") == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [({"logprobs": 0}, "logprobs is set"), ({"tools": [{"type": "function"}]}, "tools is set")],
    ids=["logprobs", "tools"],
)
@both
async def test_what_cannot_be_continued_ends_with_an_error(endpoint, more, says) -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(Fault(events=5))
    body = BODIES[endpoint] | STREAM | more
    async with proxied(decode=[first, second]) as front:
        status, answer = await front.post(endpoint, body)
        chunks = read(answer)
        assert status == 200
        assert answer.startswith(b"".join(events(endpoint, body)[:5]))
        assert len(chunks) == 6
        assert chunks[-1]["error"]["code"] == 502
        assert says in chunks[-1]["error"]["message"]
        assert await front.metric("hand_overs_total", outcome="not_possible") == 1
        assert await front.metric("requests_total", outcome="broken_off") == 1
    assert second.asked == []


async def test_the_words_of_an_engine_that_dies_in_the_middle_are_passed_on() -> None:
    first = FakeEngine("a")
    first.faults.append(
        Fault(events=5, then=b'data: {"error": {"message": "core", "code": 500}}\n\ndata: [DONE]\n\n')
    )
    async with proxied(decode=[first]) as front:
        _, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        assert read(answer)[-1] == {"error": {"message": "core", "code": 500}}
        assert await front.metric("hand_overs_total", outcome="no_engine") == 1


async def test_an_engine_that_would_say_something_else_is_not_listened_to() -> None:
    """Its 400, or another prompt than it was given: the client gets what it has read so far, and an error."""
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(Fault(events=5))
    second.faults.append(Fault(status=400, body=b'{"error": {"message": "unknown field"}}'))
    async with proxied(decode=[first, second]) as front:
        _, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        chunks = read(answer)
        assert text_of(chunks) == "Grü"
        assert "refuses to go on: 400" in chunks[-1]["error"]["message"]
        assert await front.metric("hand_overs_total", outcome="differs") == 1


# --- silence, and clients that go ---


async def test_a_stream_that_stalls_goes_on_elsewhere() -> None:
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(Fault(events=5, then="hang"))
    async with proxied(decode=[first, second], stall_s=2.0) as front:
        _, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        assert text_of(read(answer)) == SCRIPT.encode()[:40].decode()
        assert await front.metric("engine_failures_total", reason="timeout") == 1
        await wait_until_async(lambda: first.cancelled == 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_goes_down_ends_the_waits_for_it(stream) -> None:
    """A stopped process keeps its connections; only its health checks fail."""
    first, second = FakeEngine("a"), FakeEngine("b")
    first.faults.append(Fault(events=5, sends=None if stream else 5, then="hang"))
    async with proxied(decode=[first, second], health_failures_max=2) as front, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(front.post(Endpoint.COMPLETIONS, COMPLETION | {"stream": stream}))
        await wait_until_async(lambda: first.in_flight == 1)
        first.healthy = False
        status, answer = await asked
        assert status == 200
        text = text_of(read(answer)) if stream else json.loads(answer)["choices"][0]["text"]
        assert text == SCRIPT.encode()[:40].decode()


async def test_a_request_that_takes_too_long() -> None:
    decode = FakeEngine()
    decode.faults.extend([Fault(events=5, then="hang"), Fault(sends=0, then="hang"), Fault(then="hang")])
    async with proxied(decode=[decode], request_s=1.5) as front:
        _, answer = await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        assert read(answer)[-1]["error"]["code"] == 504
        for stream in (True, False):
            await front.metric_is(1, "engine_up", role="decode")
            status, _ = await front.post(Endpoint.COMPLETIONS, COMPLETION | {"stream": stream})
            assert status == 504


@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
async def test_a_client_that_goes_cancels_its_request(where) -> None:
    prefill, decode = FakeEngine(), FakeEngine()
    (prefill if where == "prefill" else decode).faults.append(Fault(events=5, then="hang"))
    engine = prefill if where == "prefill" else decode
    async with proxied(prefill=[prefill], decode=[decode]) as front:
        body = COMPLETION | {"stream": where == "stream"}
        request = front.session.post(front.url + Endpoint.COMPLETIONS, json=body)
        if where == "stream":
            async with request as response:
                await response.content.readany()
        else:
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(request.__aenter__())
                await wait_until_async(lambda: engine.in_flight == 1)
                asked.cancel()
        await wait_until_async(lambda: engine.cancelled == 1)
        assert engine.in_flight == 0
        await front.metric_is(1, "requests_total", outcome="cancelled")
        await front.metric_is(0, "in_flight")
        assert await front.metric("engine_failures_total") == 0


async def test_a_hundred_clients_that_go_at_random_moments() -> None:
    """Afterwards all is at 0: nothing under way here, nor at an engine."""
    rng = random.Random(3)
    engines = [FakeEngine() for _ in range(4)]
    for engine in engines:
        engine.faults.extend(
            Fault(events=rng.randrange(9), then=rng.choice(["hang", "end"])) for _ in range(99)
        )
    async with proxied(prefill=engines[:2], decode=engines[2:]) as front:

        async def ask(turns: int, *, stream: bool) -> None:
            body = COMPLETION | {"stream": stream}
            asked = asyncio.ensure_future(front.post(Endpoint.COMPLETIONS, body))
            for _ in range(turns):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])

        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(ask(rng.randrange(400), stream=number % 2 == 0))
        await front.metric_is(0, "in_flight")
        await front.metric_is(0, "engine_in_flight")
        await wait_until_async(lambda: sum(engine.in_flight for engine in engines) == 0)
        # Some are answered before they go, and some fail because both decode engines broke off: what counts is that
        # everyone is counted once.
        assert await front.metric("requests_total", outcome="cancelled") > 20
        assert sum([await front.metric("requests_total", outcome=one) for one in OUTCOMES]) == 100


async def test_a_client_that_does_not_read_is_given_up() -> None:
    """Mutant: no deadline for writing."""
    decode = FakeEngine()
    flood = b"data: " + json.dumps({"choices": [{"index": 0, "text": "x" * 1_000_000}]}).encode() + b"\n\n"
    decode.faults.append(Fault(sends=0, then=flood * 20))
    body = COMPLETION | STREAM | {"logprobs": 1}
    async with (
        proxied(decode=[decode], client_stall_s=0.3) as front,
        aiohttp.ClientSession(read_bufsize=1024) as lazy,
        lazy.post(front.url + Endpoint.COMPLETIONS, json=body) as response,
    ):
        await front.metric_is(1, "requests_total", outcome="cancelled")
        await wait_until_async(lambda: decode.in_flight == 0)
        with pytest.raises(aiohttp.ClientError):  # and what it has is not taken for a whole answer
            await response.read()


async def test_a_bug_in_the_middle_of_a_stream_cuts_it_off(monkeypatch) -> None:
    """It must neither look like the end of the answer nor leave the client waiting."""
    take = Answer.take

    def take_three(answer: Answer, chunk: dict[str, Any]) -> dict[str, Any] | None:
        assert answer.tokens < 3, "a bug"
        return take(answer, chunk)

    monkeypatch.setattr(Answer, "take", take_three)
    async with proxied(decode=[FakeEngine()]) as front:
        with pytest.raises(aiohttp.ClientError):
            await front.post(Endpoint.COMPLETIONS, COMPLETION | STREAM)
        await front.metric_is(1, "requests_total", outcome="failed")
        await front.metric_is(0, "engine_in_flight")
