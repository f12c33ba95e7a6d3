"""What prefill and decode engines behind a proxy are put through: lengths, cancelled clients, races and deaths.

Each answer is compared with that of the same prompt under a cache salt of its own, which one engine computes alone.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx

from connector.handoff import write_note
from connector.keys import links_of
from deploy.demo.engine import Answer, Engine
from deploy.demo.proxy import Proxy
from kvstore.client import KVStore
from kvstore.core import Namespace
from tests.e2e.fleet import BLOCK_TOKENS, Fleet, request_of
from tests.e2e.support import ask
from tests.support import wait_until

GENERATED_TOKENS = 16
ALONE = "computed alone"
CHUNK_TOKENS = 256
AT_ONCE, LONGEST_S = 8, 2.0  # clients, and how long the most patient of those waits that go by time
CANCELLED_TOKENS = 140, 520  # of their prompts, from and to
GENERATED_MAX = 48  # for those that stay
RACED_TOKENS = 700
LAST_TOKENS = 8  # of an answer: they may all have come before a kill is through
RECOMPUTED_MAX = 2 * BLOCK_TOKENS  # when an answer goes on elsewhere


def pass_lengths(fleet: Fleet, proxy: Proxy, decode: Engine, lengths: Sequence[int]) -> None:
    """Prompts of these lengths through prefill and decode: at most one engine block is computed again."""
    for length in lengths:
        prompt = fleet.prompts.cut(length)
        answer = proxy.ask(prompt, GENERATED_TOKENS, decode)
        alone = decode.ask(prompt, GENERATED_TOKENS, salt=ALONE)
        print(f"{length} tokens: {answer.pulled} pulled, {answer.computed} computed")
        assert answer.prompt_tokens == length
        assert answer.text == alone.text, f"{length} tokens"
        assert answer.computed <= BLOCK_TOKENS, f"of {length} tokens {answer.computed} were computed again"
        assert answer.computed + answer.pulled == length
        assert (alone.computed, alone.pulled) == (length, 0)


# --- cancelled clients --------------------------------------------------------------------------------


def cancel(fleet: Fleet, proxy: Proxy, requests: int, rng: random.Random) -> Counter[str]:
    """So many requests, a few at a time, whose clients go: every other one after some time, whatever has come by
    then, the others after some tokens. How many went in which state."""
    prompts = [fleet.prompts.cut(rng.randrange(*CANCELLED_TOKENS)) for _ in range(requests // 4)]
    ends: Counter[str] = Counter()

    async def one(client: httpx.AsyncClient, turn: asyncio.Semaphore, patient: bool) -> None:
        body, tokens = request_of(rng.choice(prompts), GENERATED_MAX, stream=True), 0
        enough = rng.randrange(1, GENERATED_MAX) if patient else GENERATED_MAX
        async with turn:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if patient else LONGEST_S * rng.random() ** 2):
                    async with client.stream("POST", f"{proxy.url}/v1/completions", json=body) as reply:
                        assert reply.status_code == 200
                        async for line in reply.aiter_lines():
                            assert '"error"' not in line, line
                            tokens += line.startswith("data: {")
                            if tokens == enough:
                                break
        ends["in the middle" if tokens else "before the first token"] += tokens < GENERATED_MAX

    async def all_of_them() -> None:
        turn = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as tasks:
            for number in range(requests):
                tasks.create_task(one(client, turn, patient=number % 2 == 0))

    asyncio.run(all_of_them())
    print(f"cancelled: {dict(ends)}")
    return ends


def pass_cancellations(fleet: Fleet, proxy: Proxy, decode: Engine, requests: int) -> None:
    """Clients that go leave nothing behind, and the next one is served."""
    ends = cancel(fleet, proxy, requests, random.Random(5))
    assert ends["before the first token"] > 0
    assert ends["in the middle"] >= requests / 2
    wait_until(lambda: proxy.metric("kvstore_proxy_in_flight") == 0, 60, "no request at the proxy")
    wait_until(lambda: proxy.metric("kvstore_proxy_engine_in_flight") == 0, 10, "none at engines")
    fleet.wait_for_nothing_left()
    pass_lengths(fleet, proxy, decode, [639])


# --- hand-off race ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raced:
    """One run of the race: what decode answered, whether prefill was killed, how long before prefill had finished
    (or, killed, would have) decode was asked, and how long it waited before it computed."""

    answer: Answer
    killed: bool
    early_s: float
    waited_s: float

    @property
    def pulled(self) -> bool:
        """All but an engine block."""
        return self.answer.pulled >= self.answer.prompt_tokens - BLOCK_TOKENS

    def __str__(self) -> str:
        killed = ", prefill was killed" if self.killed else ""
        origin = f"{self.answer.pulled} pulled, {self.answer.computed} computed"
        return f"{self.early_s:.2f} s early{killed}: waited {self.waited_s:.2f} s, {origin}"


def note_of(fleet: Fleet, prompt: list[int]) -> dict[str, object]:
    """The hand-off of a prompt that no engine has seen yet."""
    [name] = {view["namespace"] for view in fleet.node.objects()}
    namespace = Namespace(bytes.fromhex(name))
    with KVStore(fleet.node.control) as store:
        manifest = store.manifest(namespace)
    assert manifest is not None
    request = SimpleNamespace(
        all_token_ids=prompt,
        num_prompt_tokens=len(prompt),
        cache_salt=None,
        mm_features=(),
        prompt_embeds=None,
    )
    note = write_note(manifest, links_of(request, namespace, CHUNK_TOKENS, BLOCK_TOKENS), ())
    assert note is not None
    return note


def race(fleet: Fleet, prefill: str, decode: Engine, early_s: float, *, kill: bool) -> Raced:
    """Decode is asked `early_s` before prefill finishes, by the time that the last prompt took. With `kill`, prefill
    is killed half of that before it would finish."""
    prompt, other = fleet.prompts.cut(RACED_TOKENS), fleet.prompts.cut(RACED_TOKENS)
    alone = decode.ask(prompt, GENERATED_TOKENS, salt=ALONE)
    engine = fleet.engines[prefill]
    began = time.monotonic()
    engine.prefill(other)
    takes_s = time.monotonic() - began
    note = note_of(fleet, prompt)
    began = time.monotonic()

    def strike() -> None:
        reached(began + takes_s - early_s / 2)
        engine.kill()

    def compute() -> float:
        with contextlib.suppress(httpx.TransportError):  # it was killed
            engine.prefill(prompt)
        return time.monotonic() - began

    with ThreadPoolExecutor(2) as beside:
        prefilled = beside.submit(compute)
        reached(began + takes_s - early_s)
        asked_s = time.monotonic() - began
        killed = beside.submit(strike) if kill else None
        asked = ask(decode, prompt, GENERATED_TOKENS, hand_off=note)
        if killed:
            killed.result()
        finished_s = prefilled.result()
    assert asked.answer.text == alone.text
    return Raced(asked.answer, kill, (takes_s if kill else finished_s) - asked_s, asked.waited_s)


def reached(moment: float) -> None:
    """Returns when the clock has come to this moment."""
    wait_until(lambda: time.monotonic() >= moment, 120, "the moment to come")


# --- live hand-over -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """A streamed answer as its client saw it."""

    token_ids: list[int]
    text: str
    ids: set[str]
    generated: int
    done: int


def listen(url: str, body: dict[str, object], at_token: Callable[[int], object] = lambda _: None) -> Stream:
    """Reads one stream to its end; `at_token` is called with the number of tokens that have come."""
    token_ids: list[int] = []
    text, ids, generated, done = "", set(), 0, 0
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | options, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        for event in _events(reply):
            if event is None:
                done += 1
                continue
            assert "error" not in event, event
            ids.add(event["id"])
            for choice in event["choices"]:
                text += choice["text"]
                token_ids += choice["token_ids"] or []
                at_token(len(token_ids))
            if event.get("usage"):
                generated = event["usage"]["completion_tokens"]
    return Stream(token_ids, text, ids, generated, done)


def _events(reply: httpx.Response) -> Iterator[dict[str, Any] | None]:
    for line in reply.iter_lines():
        if line.startswith("data: "):
            yield None if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))


@dataclass(frozen=True)
class HandOver:
    """A stream whose engine was killed after `at` tokens, and what the engine that went on computed."""

    at: int
    died: str
    went_on: str
    computed: int
    pulled: int


def hand_over(fleet: Fleet, proxy: Proxy, decode: Sequence[str], rng: random.Random, tokens: int) -> HandOver:
    """The engine that answers is SIGKILLed after a random number of tokens; the client notices nothing.

    `decode` are the engines behind the proxy. Two of them must serve; others may be about to.
    """
    prompt = fleet.prompts.cut(rng.randrange(300, 700))
    up = fleet.up(decode, least=2)
    alone = listen(fleet.engines[up[0]].url, request_of(prompt, tokens, cache_salt=ALONE))
    assert len(alone.token_ids) == tokens
    at, died = rng.randrange(1, tokens - LAST_TOKENS), ""
    before: dict[str, dict[str, int]] = {}

    def strike(come: int) -> None:
        nonlocal died
        if not before:  # what prefill did is done
            before.update({name: fleet.engines[name].tokens_by_source() for name in up})
        if come >= at and not died:
            died = fleet.serving(proxy)
            fleet.engines[died].kill()

    stream = listen(proxy.url, request_of(prompt, tokens), strike)
    assert died, "nobody was killed"
    assert (stream.token_ids, stream.text) == (alone.token_ids, alone.text)
    assert (len(stream.ids), stream.generated, stream.done) == (1, tokens, 1)
    gains = {
        name: {k: v - before.get(name, {}).get(k, 0) for k, v in engine.tokens_by_source().items()}
        for name in decode
        if (engine := fleet.engines[name]).running and engine.serves()
    }
    went_on = max(gains, key=lambda name: sum(gains[name].values()))
    gain = gains[went_on]
    return HandOver(at, died, went_on, gain["local_compute"], gain["external_kv_transfer"])
