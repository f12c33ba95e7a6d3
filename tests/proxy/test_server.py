"""What a request meets before it is one: routes, the token, bounds; and what operators ask."""

import asyncio
import re

import pytest

from kvstore.core import BadConfiguration
from kvstore.proxy import engine_url
from kvstore.proxy.ask import Endpoint
from tests.proxy.fake_engine import FakeEngine, Front, proxied
from tests.support import wait_until_async

BODY = {"model": "m", "prompt": "Tell", "max_tokens": 5}
TOKEN = b"0123456789abcdef"


async def post_text(front: Front, text: bytes) -> tuple[int, str]:
    async with front.session.post(front.url + Endpoint.CHAT, data=text) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("text", "says"), [(b"{", "not JSON"), (b"\xff", "not JSON"), (b"[1]", "not a JSON object")]
)
async def test_what_is_no_request_is_refused(text, says) -> None:
    engine = FakeEngine()
    async with proxied(decode=[engine]) as front:
        status, answer = await post_text(front, text)
        assert (status, says in answer) == (400, True)
        assert await front.metric("requests_total", outcome="refused") == 1
    assert engine.asked == []


async def test_a_request_is_bounded() -> None:
    engine = FakeEngine()
    async with proxied(decode=[engine], body_bytes_max=1_000) as front:
        status, answer = await post_text(front, b'{"a": "' + b"x" * 1_000 + b'"}')
        assert (status, "1000 bytes" in answer) == (413, True)
        assert await front.metric("requests_total", outcome="refused") == 1
        assert await front.metric("in_flight") == 0
    assert engine.asked == []


async def test_a_client_may_not_take_for_ever_to_ask() -> None:
    async with proxied(decode=[FakeEngine()], body_s=0.2) as front:
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
        answer = await reader.readuntil(b"\r\n")
        assert answer == b"HTTP/1.1 408 Request Timeout\r\n"
        writer.close()
        await writer.wait_closed()


async def test_so_many_at_once_and_no_more() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with proxied(decode=[engine], in_flight_max=2) as front, asyncio.TaskGroup() as tasks:
        under_way = [tasks.create_task(front.post(Endpoint.COMPLETIONS, BODY)) for _ in range(2)]
        await wait_until_async(lambda: engine.in_flight == 2)
        assert await front.metric("in_flight") == 2
        async with front.session.post(front.url + Endpoint.COMPLETIONS, json=BODY) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        engine.gate.set()
        assert [(await task)[0] for task in under_way] == [200, 200]
        assert (await front.post(Endpoint.COMPLETIONS, BODY))[0] == 200


async def test_the_token_is_asked_for_everywhere_but_by_probes() -> None:
    engine = FakeEngine()
    async with proxied(decode=[engine], token=TOKEN) as front:
        for headers in (None, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN.decode()}):
            assert (await front.post(Endpoint.COMPLETIONS, BODY, headers))[0] == 401
            assert (await front.get("/metrics", headers))[0] == 401
            assert (await front.get("/v1/models", headers))[0] == 401
        assert (await front.get("/healthz"))[0] == 200
        assert engine.asked == []
        right = {"Authorization": f"Bearer {TOKEN.decode()}"}
        assert (await front.post(Endpoint.COMPLETIONS, BODY, right))[0] == 200
        assert (await front.get("/v1/models", right))[0] == 200
    assert "Authorization" not in engine.asked[0].headers


@pytest.mark.parametrize(
    ("settings", "given", "passed"),
    [
        ({}, "Bearer client", "Bearer client"),
        ({"engine_token": b"engines"}, "Bearer client", "Bearer engines"),
        ({"engine_token": b"engines", "token": TOKEN}, f"Bearer {TOKEN.decode()}", "Bearer engines"),
    ],
    ids=["the client's", "instead of it", "one for each side"],
)
async def test_what_engines_are_told_about_who_asks(settings, given, passed) -> None:
    """Mutant: passing the proxy's own token on."""
    prefill, decode = FakeEngine(), FakeEngine()
    async with proxied(prefill=[prefill], decode=[decode], **settings) as front:
        assert (await front.post(Endpoint.COMPLETIONS, BODY, {"Authorization": given}))[0] == 200
    assert [engine.asked[0].headers["Authorization"] for engine in (prefill, decode)] == [passed, passed]


async def test_models_are_those_of_a_decode_engine() -> None:
    engine = FakeEngine("d")
    async with proxied(decode=[engine]) as front:
        assert '"id": "d"' in (await front.get("/v1/models"))[1]
        await engine.stop()
        assert (await front.get("/v1/models"))[0] == 503


async def test_an_unknown_path_says_what_there_is() -> None:
    async with proxied(decode=[FakeEngine()]) as front:
        status, text = await front.get("/v1/embeddings")
        assert (status, "POST /v1/completions" in text) == (404, True)
        assert (await front.get(Endpoint.CHAT))[0] == 405


async def test_without_decode_it_is_not_healthy_and_says_so_at_once() -> None:
    engine = FakeEngine()
    async with proxied(prefill=[FakeEngine()], decode=[engine]) as front:
        assert (await front.get("/healthz")) == (200, '{"status": "ok", "prefill_up": 1, "decode_up": 1}')
        await engine.stop()
        for stream in (True, False):
            async with front.session.post(front.url + Endpoint.CHAT, json={"stream": stream}) as refused:
                assert refused.status in (502, 503)
        async with front.session.post(front.url + Endpoint.CHAT, json={}) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
            assert "no decode engine is up" in await refused.text()
        assert (await front.get("/healthz"))[0] == 503
        await engine.start()
        await front.metric_is(1, "engine_up", role="decode")
        assert (await front.post(Endpoint.COMPLETIONS, BODY))[0] == 200


async def test_a_request_waits_a_moment_for_an_engine_that_comes_back() -> None:
    engine = FakeEngine(healthy=False)
    async with proxied(decode=[engine], pick_s=5.0) as front, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(front.post(Endpoint.COMPLETIONS, BODY))
        await front.metric_is(1, "in_flight")
        engine.healthy = True
        assert (await asked)[0] == 200


async def test_docs_list_every_metric(repository) -> None:
    async with proxied(decode=[FakeEngine()]) as front:
        _, text = await front.get("/metrics")
    told = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    told -= {name for name in told if name.endswith("_created")}
    listed = set(
        re.findall(r"^\| `(kvstore_proxy_\w+)", (repository / "docs/PROXY.md").read_text(), re.MULTILINE)
    )
    assert told == listed


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://[::1]:8000/", "https://[::1]:8000"),
    ],
)
def test_the_url_of_an_engine(text, url) -> None:
    assert engine_url(text) == url


@pytest.mark.parametrize(
    "text", ["10.0.0.5:8000", "ftp://a", "http://", "http://a:b", "http://a/x", "http://u:p@a"]
)
def test_what_is_none(text) -> None:
    with pytest.raises(BadConfiguration, match="not the URL of an engine"):
        engine_url(text)
