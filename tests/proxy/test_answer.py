"""An answer continued elsewhere is the answer that one engine would have given, wherever it was cut.

Mutants that these tests kill: going on from the last token instead of the last cut; a cut behind an event of
several tokens; a cut behind an event without text; not adding what `stop` holds back; not keeping a stop string's
length of distance with include_stop_str_in_output; sending the overlap again; not comparing it; usage not
corrected; max_tokens or min_tokens not reduced; trusting an engine that ignores the ids.
"""

import json
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proxy.answer import Answer, NotTheSame
from kvstore.proxy.ask import Ask, Endpoint
from kvstore.proxy.config import EVENT_BYTES_MAX
from kvstore.proxy.sse import DONE, EventSplitter
from tests.proxy import dialect
from tests.proxy.dialect import SCRIPT, events, prompt_ids, read, text_of, token_ids_of

COMPLETION = {"model": "m", "prompt": "Tell: ö", "max_tokens": 60, "stream": True, "temperature": 0}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tell"}], "stream": True}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BODIES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "completion": (Endpoint.COMPLETIONS, COMPLETION),
    "ids and usage": (Endpoint.COMPLETIONS, COMPLETION | USAGE | {"return_token_ids": True}),
    "stop": (Endpoint.COMPLETIONS, COMPLETION | {"max_tokens": 80, "stop": ["STOP here", "xyz"]}),
    "stop that never comes": (Endpoint.COMPLETIONS, COMPLETION | {"stop": "no such"}),
    "stop, kept": (
        Endpoint.COMPLETIONS,
        COMPLETION | {"max_tokens": 80, "stop": ["STOP here"], "include_stop_str_in_output": True},
    ),
    "chat": (Endpoint.CHAT, CHAT | USAGE),
    "chat, ids": (Endpoint.CHAT, CHAT | {"max_completion_tokens": 50, "return_token_ids": True}),
}


def undisturbed(endpoint: Endpoint, body: dict[str, Any]) -> list[dict[str, Any]]:
    return _undisturbed(endpoint, json.dumps(body))


@cache
def _undisturbed(endpoint: Endpoint, body: str) -> list[dict[str, Any]]:
    return read(b"".join(events(endpoint, json.loads(body))))


class Reader:
    """Plays the part of `Streaming`: feeds an Answer from bytes that end somewhere."""

    def __init__(self, endpoint: Endpoint, body: dict[str, Any]) -> None:
        self.ask = Ask(endpoint, body)
        self.answer = Answer(self.ask)
        self.body = self.ask.decode_body(None)
        self.sent: list[dict[str, Any]] = []
        self.done = False
        self.asked: list[dict[str, Any]] = [self.body]
        self.expected = undisturbed(endpoint, body)

    def leg(self, cut_bytes: int | None = None, name: str = "a", **how: Any) -> None:
        stream = b"".join(events(self.ask.endpoint, self.body, name, **how))
        for event in EventSplitter(EVENT_BYTES_MAX).feed(stream[:cut_bytes]):
            if event.data == DONE:
                self.done = True
                return
            shown = self.answer.take(json.loads(event.data))
            if shown is not None:
                self.sent.append(shown)
        if self.answer.finished:
            self.sent += self.answer.ending()
            self.done = True
            return
        self.body = self.answer.resume(None)
        self.asked.append(self.body)


def assert_same(reader: Reader) -> None:
    """What the client has is what one engine would have sent, but for empty events."""
    expected = reader.expected
    assert text_of(reader.sent) == text_of(expected)
    assert token_ids_of(reader.sent) == token_ids_of(expected)
    assert {(c["id"], c["created"]) for c in reader.sent} == {(c["id"], c["created"]) for c in expected}
    assert reader.sent[-1].get("usage") == expected[-1].get("usage")
    finishes = [c["choices"][0]["finish_reason"] for c in reader.sent if c["choices"]]
    assert finishes[-1] is not None
    assert set(finishes[:-1]) <= {None}
    roles = [c for c in reader.sent if c["choices"] and "role" in c["choices"][0].get("delta", {})]
    assert len(roles) == (reader.ask.endpoint is Endpoint.CHAT)
    prompts = [c for c in reader.sent if (c.get("prompt_token_ids") or "prompt_token_ids" in str(c))]
    shown = [
        c
        for c in prompts
        if c.get("prompt_token_ids") or (c["choices"] and c["choices"][0].get("prompt_token_ids"))
    ]
    assert len(shown) == reader.ask.shows_token_ids
    if "usage" in (reader.ask.body.get("stream_options") or {}):
        assert all(c["usage"]["prompt_tokens"] == expected[-1]["usage"]["prompt_tokens"] for c in reader.sent)


def cut_everywhere(reader_of: Callable[[], Reader], cuts: Iterable[int]) -> None:
    """One death at each of these bytes."""
    legs = set()
    for cut in cuts:
        reader = reader_of()
        reader.leg(cut)
        if not reader.done:
            reader.leg(name="b" if reader.sent else "a")
        assert reader.done
        assert_same(reader)
        legs.add(len(reader.asked))
    assert legs == {1, 2}


@pytest.mark.parametrize("kind", BODIES)
def test_cut_between_any_two_events(kind) -> None:
    endpoint, body = BODIES[kind]
    ends = accumulate(map(len, events(endpoint, Ask(endpoint, body).decode_body(None))), initial=0)
    cut_everywhere(lambda: Reader(endpoint, body), ends)


@pytest.mark.parametrize("kind", ["ids and usage", "chat"])
def test_cut_at_every_byte(kind) -> None:
    """Of a short answer: 'G', 'r' and the two halves of 'ü'."""
    endpoint, body = BODIES[kind]
    body = body | {"max_tokens": 4}
    size = sum(map(len, events(endpoint, Ask(endpoint, body).decode_body(None))))
    cut_everywhere(lambda: Reader(endpoint, body), range(size))


@pytest.mark.parametrize("kind", BODIES)
@given(
    cuts=st.lists(st.integers(1, 9_000), max_size=6),
    groups=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=7, max_size=7),
)
def test_cut_several_times_with_several_tokens_in_an_event(kind, cuts, groups) -> None:
    """Speculative decoding and busy engines send several tokens at once; then only some places are cuts."""
    reader = Reader(*BODIES[kind])
    for cut, group in zip(cuts, groups, strict=False):
        if not reader.done:
            reader.leg(cut, groups=group)
    if not reader.done:
        reader.leg(groups=groups[-1])
    assert_same(reader)


def test_the_next_engine_is_asked_for_exactly_the_rest() -> None:
    endpoint, body = BODIES["completion"]
    reader = Reader(endpoint, body | {"min_tokens": 20, "truncate_prompt_tokens": 4})
    reader.leg(sum(map(len, events(endpoint, reader.body)[:9])))
    asked = reader.asked[-1]
    prompt = prompt_ids(endpoint, body)
    assert asked["prompt"] == prompt + list(SCRIPT.encode()[:9])
    assert (asked["max_tokens"], asked["min_tokens"]) == (51, 11)
    assert "truncate_prompt_tokens" not in asked


def test_what_is_computed_again_is_a_character_and_no_more() -> None:
    """Cut behind the first byte of 'ü': the engine goes on from before it."""
    endpoint, body = BODIES["completion"]
    reader = Reader(endpoint, body)
    assert SCRIPT[2] == "ü"
    reader.leg(sum(map(len, events(endpoint, reader.body)[:3])))
    assert reader.asked[-1]["prompt"][-2:] == [*b"Gr"]
    assert reader.asked[-1]["max_tokens"] == 58


def test_a_chat_goes_on_by_its_ids() -> None:
    endpoint, body = BODIES["chat"]
    reader = Reader(endpoint, body | {"kv_transfer_params": {"one_shot": True}})
    reader.leg(sum(map(len, events(endpoint, reader.body)[:5])))
    parameters = reader.asked[-1]["kv_transfer_params"]
    assert parameters == {
        "one_shot": True,
        "live": 4,
        "prompt_token_ids": prompt_ids(endpoint, body) + list(SCRIPT.encode()[:4]),
    }
    assert reader.asked[-1]["messages"] == body["messages"]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_nothing_shows_that_ids_were_asked_for(kind) -> None:
    endpoint, body = BODIES[kind]
    reader = Reader(endpoint, body)
    reader.leg()
    assert reader.sent == undisturbed(endpoint, body)


def test_the_usage_that_a_dead_engine_did_not_send() -> None:
    endpoint, body = BODIES["ids and usage"]
    reader = Reader(endpoint, body)
    reader.leg(sum(map(len, events(endpoint, reader.body)[:-2])))
    assert reader.done
    assert len(reader.asked) == 1
    assert_same(reader)


def test_an_engine_that_ignores_the_ids_is_not_believed() -> None:
    endpoint, body = BODIES["chat"]
    reader = Reader(endpoint, body)
    reader.leg(sum(map(len, events(endpoint, reader.body)[:6])))
    before = len(reader.sent)
    with pytest.raises(NotTheSame, match="another prompt"):
        reader.leg(knows_ids=False)
    assert len(reader.sent) == before


@pytest.mark.parametrize("kind", ["stop", "ids and usage"])
def test_an_engine_that_says_something_else_is_not_believed(kind, monkeypatch) -> None:
    """Sampling, other weights: what is computed again does not come out as it was sent."""
    endpoint, body = BODIES[kind]
    reader = Reader(endpoint, body)
    reader.leg(sum(map(len, events(endpoint, reader.body, groups=[3])[:9])), groups=[3])
    before = text_of(reader.sent)
    monkeypatch.setattr(dialect, "SCRIPT", SCRIPT.upper())
    with pytest.raises(NotTheSame, match="sent"):
        reader.leg()
    assert text_of(reader.sent) == before


def test_an_engine_that_ends_before_what_was_sent_is_not_believed(monkeypatch) -> None:
    endpoint, body = BODIES["completion"]
    reader = Reader(endpoint, body)
    reader.leg(sum(map(len, events(endpoint, reader.body, groups=[3])[:9])), groups=[3])
    assert reader.asked[-1]["max_tokens"] == 59
    monkeypatch.setattr(dialect, "SCRIPT", text_of(reader.sent)[:-1])
    with pytest.raises(NotTheSame, match="ends before"):
        reader.leg()


def test_an_engine_that_does_not_say_what_it_goes_on_from_is_not_believed() -> None:
    endpoint, body = BODIES["completion"]
    reader = Reader(endpoint, body)
    reader.leg(sum(map(len, events(endpoint, reader.body)[:9])))
    chunk = json.loads(events(endpoint, reader.body)[0].removeprefix(b"data: "))
    chunk["choices"][0]["prompt_token_ids"] = None
    with pytest.raises(NotTheSame, match="does not say which prompt"):
        reader.answer.take(chunk)


NOT_CONTINUED = {
    "n": 2,
    "echo": True,
    "logprobs": 0,
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "bad_words": ["no"],
    "structured_outputs": {"regex": "a*"},
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "use_beam_search": True,
    "stream": False,
    "prompt": ["one", "two"],
    "vllm_xargs": {"a": 1},
}


@pytest.mark.parametrize("name", NOT_CONTINUED)
def test_what_cannot_be_continued_is_passed_through_untouched(name) -> None:
    ask = Ask(Endpoint.COMPLETIONS, COMPLETION | {name: NOT_CONTINUED[name]})
    assert ask.obstacle
    assert ask.decode_body(None) == ask.body


@pytest.mark.parametrize(
    "more",
    [
        {
            "n": 1,
            "logprobs": None,
            "echo": False,
            "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
        },
        {"prompt": ["one"]},
        {"prompt": [1, 2, 3]},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {"5": 1}},
    ],
)
def test_what_can_be_continued(more) -> None:
    assert Ask(Endpoint.COMPLETIONS, COMPLETION | more).obstacle == ""


def test_pictures_are_not_continued() -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert (
        "not text" in Ask(Endpoint.CHAT, CHAT | {"messages": [{"role": "user", "content": parts}]}).obstacle
    )
    only_text = [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": None}]
    assert Ask(Endpoint.CHAT, CHAT | {"messages": only_text}).obstacle == ""


SPOILT = {
    "no ids": (lambda choice: choice.pop("token_ids"), "token ids"),
    "reasoning": (lambda choice: choice["delta"].update(reasoning="hm"), "parsed"),
    "a call": (lambda choice: choice["delta"].update(tool_calls=[{"index": 0}]), "parsed"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_a_parser_has_had_its_hands_on_is_not_continued(how) -> None:
    spoil, says = SPOILT[how]
    answer = Answer(Ask(Endpoint.CHAT, CHAT))
    first, second = events(Endpoint.CHAT, CHAT | {"return_token_ids": True})[:2]
    answer.take(json.loads(first.removeprefix(b"data: ")))
    chunk = json.loads(second.removeprefix(b"data: "))
    spoil(chunk["choices"][0])
    assert answer.obstacle == ""
    assert answer.take(chunk) is not None
    assert says in answer.obstacle


def test_what_is_remembered_does_not_grow_with_the_text(monkeypatch) -> None:
    monkeypatch.setattr(dialect, "SCRIPT", "word " * 2_000)
    answer = Answer(ask := Ask(Endpoint.COMPLETIONS, COMPLETION | {"max_tokens": 9_000}))
    for event in events(ask.endpoint, ask.decode_body(None))[:-1]:
        answer.take(json.loads(event.removeprefix(b"data: ")))
        assert len(answer._text) <= 2
        assert len(answer._cuts) <= 2
    assert answer.tokens == 9_000


def test_prefill_gets_the_prompt_and_nothing_about_the_answer() -> None:
    body = (
        CHAT
        | USAGE
        | {"n": 3, "logprobs": True, "top_logprobs": 2, "min_tokens": 5, "tools": ["t"], "stop": "x"}
    )
    assert Ask(Endpoint.CHAT, body).prefill_body() == {
        "model": "m",
        "messages": CHAT["messages"],
        "tools": ["t"],
        "stop": "x",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
    }
    assert "max_completion_tokens" not in Ask(Endpoint.COMPLETIONS, COMPLETION).prefill_body()


def test_the_hand_off_is_added_to_what_the_client_says() -> None:
    ask = Ask(Endpoint.COMPLETIONS, COMPLETION | {"kv_transfer_params": {"ttl_s": 5, "kvstore": "old"}})
    assert ask.decode_body({"kvstore": "new"})["kv_transfer_params"] == {
        "ttl_s": 5,
        "live": 0,
        "kvstore": "new",
    }
    several = Ask(Endpoint.COMPLETIONS, COMPLETION | {"prompt": ["a", "b"]})
    assert "kv_transfer_params" not in several.decode_body({"kvstore": "of the first only"})


def test_hints_go_to_both_but_only_decode_consumes() -> None:
    hints = {"one_shot": True, "consume_once": True}
    ask = Ask(Endpoint.CHAT, CHAT | {"kv_transfer_params": hints})
    assert ask.prefill_body()["kv_transfer_params"] == {"one_shot": True}
    assert ask.decode_body(None)["kv_transfer_params"] == hints | {"live": 0}
    going_on = ask.continuation_body([1, 2], [3, 4, 5])["kv_transfer_params"]
    assert going_on == hints | {"live": 3, "prompt_token_ids": [1, 2, 3, 4, 5]}


def test_the_model_of_these_tests_spoils_a_character_that_it_starts_inside_of() -> None:
    """Or going on from any token would pass."""
    prompt = prompt_ids(Endpoint.COMPLETIONS, COMPLETION)
    texts = [
        "".join(step.text for step in dialect.steps([*prompt, *SCRIPT.encode()[:said]], {}))
        for said in range(len(SCRIPT.encode()))
    ]
    assert sum("\ufffd" in text for text in texts) == len(SCRIPT.encode()) - len(SCRIPT)
    assert [a for a, b in pairwise(texts) if len(a) < len(b) and "\ufffd" not in b] == []
