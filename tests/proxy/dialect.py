"""vLLM's dialect of the OpenAI API, spoken by a model of a few lines. Pure.

A token is a byte of UTF-8, so characters are split between tokens as real tokenizers split them. Every prompt
ends with `ASSISTANT`; the model says `SCRIPT` from where the tokens behind the last `ASSISTANT` have got to. The
detokenizer holds back what vLLM's holds back, and like vLLM's it spoils a character that it starts inside of.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from itertools import chain, cycle
from typing import Any, NamedTuple

from kvstore.proxy.ask import Endpoint

Body = dict[str, Any]
SCRIPT = "Grüße: 🙂 naïve façade — 12 Öfen. STOP here, or go on with £5 and ¥7, said Zoë."
ASSISTANT = 1
END = 2  # end of sequence: a token without text
HAND_OFF = {"kvstore": {"namespace": "78a1", "tokens": 12, "last": "0492", "nodes": ["55e1"]}}


class Step(NamedTuple):
    """What one event says."""

    text: str
    token_ids: list[int]
    finish: str | None
    total: int  # tokens so far


def prompt_ids(endpoint: Endpoint, body: Body, *, knows_ids: bool = True) -> list[int]:
    """The prompt as the engine understands it."""
    if endpoint is Endpoint.CHAT:
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given and knows_ids:
            return list(given)
        text = "".join(f"<{message['role']}>{message['content']}" for message in body["messages"])
    else:
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if isinstance(prompt, list):
            return prompt
        text = prompt
    return [*text.encode(), ASSISTANT]


def generate(prompt: Sequence[int], body: Body) -> tuple[list[int], str]:
    """(token ids, finish reason)."""
    said = len(prompt) - 1 - max(index for index, each in enumerate(prompt) if each == ASSISTANT)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 1_000
    rest = [*SCRIPT.encode()[said:], END]
    return rest[:limit], "stop" if len(rest) <= limit else "length"


def steps(prompt: Sequence[int], body: Body, groups: Sequence[int] = (1,)) -> Iterator[Step]:
    """The answer event by event, with so many tokens in each."""
    tokens, finish = generate(prompt, body)
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    keep_stop = bool(body.get("include_stop_str_in_output"))
    held = max(map(len, stops), default=1) - 1 if not keep_stop else 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text, shown, at = "", 0, 0
    for size in chain([1], cycle(groups)):
        ids = tokens[at : at + size]
        at += len(ids)
        stopped = False
        for used, token in enumerate(ids, start=1):
            text += "" if token == END else decoder.decode(bytes([token]))
            ends = [text.find(each) + (len(each) if keep_stop else 0) for each in stops if each in text]
            if ends:
                text, stopped, ids = text[: min(ends)], True, ids[:used]
                break
        done = stopped or at >= len(tokens)
        upto = len(text) if done else max(shown, len(text) - held)
        reason = "stop" if stopped else finish
        yield Step(text[shown:upto], ids, reason if done else None, at)
        shown = upto
        if done:
            return


def events(endpoint: Endpoint, body: Body, name: str = "a", **how: Any) -> list[bytes]:
    """The events of a streamed answer. `how`: groups, knows_ids."""
    chunks = list(_chunks(endpoint, body, name, **how))
    return [b"data: " + _json(chunk) + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def _chunks(
    endpoint: Endpoint, body: Body, name: str, groups: Sequence[int] = (1,), *, knows_ids: bool = True
) -> Iterator[Body]:
    prompt = prompt_ids(endpoint, body, knows_ids=knows_ids)
    chat, ids_wanted = endpoint is Endpoint.CHAT, body.get("return_token_ids")
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1_000 + ord(name[0]),
        "model": body.get("model", "m"),
    }
    options = body.get("stream_options") or {}
    total = 0
    shown_prompt = prompt if ids_wanted else None
    if chat:
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        yield head | {"choices": [opening | {"finish_reason": None}], "prompt_token_ids": shown_prompt}
    for number, step in enumerate(steps(prompt, body, groups)):
        choice: Body = {"index": 0, "logprobs": None, "finish_reason": step.finish, "stop_reason": None}
        choice["token_ids"] = step.token_ids if ids_wanted else None
        if chat:
            choice["delta"] = {"content": step.text}
        else:
            choice["text"] = step.text
            choice["prompt_token_ids"] = shown_prompt if number == 0 else None
        total = step.total
        chunk = head | {"choices": [choice]}
        if options.get("continuous_usage_stats"):
            chunk["usage"] = _usage(len(prompt), total)
        yield chunk
    if options.get("include_usage"):
        yield head | {"choices": [], "usage": _usage(len(prompt), total)}


def whole(endpoint: Endpoint, body: Body, name: str = "a") -> Body:
    """An answer that is not streamed, with a hand-off as a prefill engine gives it."""
    prompt = prompt_ids(endpoint, body)
    parts = list(steps(prompt, body))
    text, finish = "".join(step.text for step in parts), parts[-1].finish
    choices = [
        {"index": index, "finish_reason": finish, "logprobs": None}
        | (
            {"message": {"role": "assistant", "content": text}}
            if endpoint is Endpoint.CHAT
            else {"text": text}
        )
        for index in range(body.get("n") or 1)
    ]
    return {
        "id": f"cmpl-{name}",
        "created": 1_000,
        "choices": choices,
        "usage": _usage(len(prompt), parts[-1].total),
        "kv_transfer_params": HAND_OFF,
    }


def read(stream: bytes) -> list[Body]:
    """The chunks of a stream of whole events; its `[DONE]` must be there and be last."""
    parts = stream.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""], stream[-300:]
    return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]


def text_of(chunks: Sequence[Body]) -> str:
    """The text of the first choice."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)


def token_ids_of(chunks: Sequence[Body]) -> list[int]:
    """All of them, if they were asked for."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    return list(chain.from_iterable(choice.get("token_ids") or () for choice in choices))


def _usage(prompt: int, completion: int) -> Body:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _json(content: Body) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
