"""One streamed answer: what the client has been sent of it, and how another engine goes on with it. Pure.

The engine is asked for token ids, so that the answer so far is known as the prompt ids and the generated ids,
and no tokenisation can shift when they become the next engine's prompt. What the client has been sent is *text*,
and text lags behind tokens:

* vLLM holds back an incomplete UTF-8 character until the token that completes it, and a detokenizer that starts
  inside a character loses it;
* with `stop` it holds back as many characters as the longest stop string less one, and an engine that starts
  in the middle of a stop string does not see it.

So the next engine goes on not from the last token but from the last *cut*: a place between two tokens where the
text is known to be complete. That is behind every event that carries exactly one token and some text, if

    text at the cut  <=  text sent  -  (held back or not: longest stop string less one)

and in any case at the very beginning. What it generates between the cut and the end of what was sent is not sent
again but compared: if it differs, the answers are not the same, and the error is passed on.

      prompt           | generated, kept | dropped, computed again      (tokens)
    -------------------+-----------------+-------------------------
                     begin              cut      ^
                       |  text that was sent     |
                                         |<----->| compared, not sent again

The first event of a stream carries the prompt ids as the engine has understood them. If they are not what it was
given (a version that does not know this way in), the continuation is refused before any token of it is used.
"""

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.proxy.ask import Ask, Body, Endpoint

Chunk = dict[str, Any]


class NotTheSame(Exception):
    """An engine's events do not continue the answer that the client has begun to read."""


class Cut(NamedTuple):
    """Behind `tokens` generated tokens, whose text is exactly `chars` characters."""

    tokens: int
    chars: int


BEGIN = Cut(0, 0)


@dataclass
class Leg:
    """What one engine contributes: it started at `start`, and its text has come to the character `at`."""

    start: Cut
    at: int
    confirmed: bool = False  # it has shown its prompt ids


class Answer:
    """The state of one answer. `obstacle` says why it cannot be continued, empty as long as it can.

    Args:
        ask: the client's request.
    """

    def __init__(self, ask: Ask) -> None:
        self.obstacle = ask.obstacle
        self.finished = False  # the finish reason has been sent
        self._ask = ask
        self._chat = ask.endpoint is Endpoint.CHAT
        self._spare, self._held = _stop_lengths(ask.body)
        self._prompt: array[int] | None = None
        self._generated: array[int] = array("I")
        self._sent_tokens: array[int] = array("I")  # all of them, if the client asked for ids
        self._cuts: deque[Cut] = deque([BEGIN])
        self._text, self._text_from, self._sent_chars = (
            "",
            0,
            0,
        )  # `_text`: what was sent from `_text_from` on
        self._leg = Leg(BEGIN, at=0)
        self._head: Chunk | None = None  # id, created and the like, of the first chunk
        self._began = False  # the client has its first chunk, which in a chat carries the role
        self._usage_sent = False

    @property
    def tokens(self) -> int:
        """Generated tokens as of the last chunk."""
        return len(self._generated)

    def resume(self, hand_off: Body | None) -> Body:
        """Begins the next leg; the request for the engine that is to go on."""
        assert not self.obstacle, "the caller asks first"
        assert not self.finished, "there is nothing to go on with"
        self._prune()
        cut = self._cuts[0]
        del self._generated[cut.tokens :]
        self._cuts = deque([cut])
        self._leg = Leg(start=cut, at=cut.chars)
        if cut.tokens == 0:
            return self._ask.decode_body(hand_off)
        assert self._prompt is not None, "tokens without a prompt"
        return self._ask.continuation_body(self._prompt.tolist(), self._generated.tolist())

    def take(self, chunk: Chunk) -> Chunk | None:
        """What the client is sent of an engine's chunk; None for nothing.

        Raises:
            NotTheSame: it does not continue the answer.
        """
        choices = chunk.get("choices") or []
        if not choices:
            return self._settle(chunk)
        if len(choices) != 1:
            self.obstacle = self.obstacle or "the engine sends several choices"
            return self._settle(chunk)
        self._see_prompt(choices[0] if not self._chat else chunk)
        token_ids = choices[0].get("token_ids")
        if self._chat and token_ids is None and _only_role(choices[0]):
            return None if self._began else self._settle(chunk)
        if self._prompt is not None and not self._leg.confirmed:
            raise NotTheSame("the engine does not say which prompt it goes on from")
        if self._prompt is None or not isinstance(token_ids, list):
            self.obstacle = self.obstacle or "the engine does not say its token ids"
        return self._take_tokens(chunk, choices[0], token_ids or [])

    def ending(self) -> list[Chunk]:
        """What is still missing when an engine dies after the finish reason: the usage, if it was asked for."""
        options = self._ask.body.get("stream_options")
        wanted = isinstance(options, dict) and options.get("include_usage")
        if self._usage_sent or not wanted or self.obstacle or self._prompt is None or self._head is None:
            return []
        prompt, generated = len(self._prompt), len(self._generated)
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return [self._head | {"choices": [], "usage": usage}]

    def _see_prompt(self, holder: Chunk) -> None:
        ids = holder.get("prompt_token_ids")
        if not isinstance(ids, list):
            return
        if self._prompt is None:
            self._prompt = array("I", ids)
        elif array("I", ids) != self._prompt + self._generated[: self._leg.start.tokens]:
            raise NotTheSame("the engine goes on from another prompt than it was given")
        self._leg.confirmed = True
        if self._began or not self._ask.shows_token_ids:
            holder["prompt_token_ids"] = None

    def _take_tokens(self, chunk: Chunk, choice: Chunk, token_ids: list[int]) -> Chunk | None:
        holder, name = (choice.get("delta") or {}, "content") if self._chat else (choice, "text")
        if self._chat and any(value for key, value in holder.items() if key not in ("role", "content")):
            self.obstacle = self.obstacle or "the engine has parsed it into more than text"
        text = holder.get(name) or ""
        self._generated.extend(token_ids)
        self._leg.at += len(text)
        if len(token_ids) == 1 and text:
            self._cuts.append(Cut(len(self._generated), self._leg.at + self._held))
        new_text, new_ids = self._new_text(text), self._new_tokens(token_ids)
        finish = choice.get("finish_reason")
        if finish is not None and self._leg.at < self._sent_chars:
            raise NotTheSame("the answer ends before what was sent")
        if new_text != text:
            holder[name] = new_text
        choice["token_ids"] = new_ids if self._ask.shows_token_ids else None
        if text and not new_text and not (new_ids and self._ask.shows_token_ids) and finish is None:
            return None
        self.finished = finish is not None
        return self._settle(chunk)

    def _new_text(self, text: str) -> str:
        """The part of it that the client has not been sent; the other part must be what it was sent."""
        begin = self._leg.at - len(text)
        overlap = min(len(text), max(0, self._sent_chars - begin))
        known = self._text[begin - self._text_from :][:overlap]
        if text[:overlap] != known:
            raise NotTheSame("another text was sent than this engine generates")
        self._text += text[overlap:]
        self._sent_chars += len(text) - overlap
        self._prune()
        return text[overlap:]

    def _new_tokens(self, token_ids: list[int]) -> list[int]:
        """The same for ids, if the client sees them."""
        if not self._ask.shows_token_ids:
            return []
        begin = len(self._generated) - len(token_ids)
        overlap = min(len(token_ids), max(0, len(self._sent_tokens) - begin))
        if array("I", token_ids[:overlap]) != self._sent_tokens[begin : begin + overlap]:
            raise NotTheSame("other tokens were sent than this engine generates")
        self._sent_tokens.extend(token_ids[overlap:])
        return token_ids[overlap:]

    def _prune(self) -> None:
        """Forgets the cuts before the last one that can be used, and the text before that.

        `at` and not what was sent counts: text that this leg has not reached is not yet known to be its own.
        """
        while len(self._cuts) > 1 and self._cuts[1].chars <= self._leg.at - (self._spare - self._held):
            self._cuts.popleft()
        first = self._cuts[0].chars
        if first > self._text_from:
            self._text = self._text[first - self._text_from :]
            self._text_from = first

    def _settle(self, chunk: Chunk) -> Chunk:
        """One identity and one count for all legs."""
        if self._head is None:
            self._head = {k: v for k, v in chunk.items() if k in ("id", "object", "created", "model")}
        chunk |= self._head
        self._began = True
        usage, more = chunk.get("usage"), self._leg.start.tokens
        if usage:
            usage["prompt_tokens"] -= more
            usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + more
            self._usage_sent = self._usage_sent or not chunk.get("choices")
        return chunk


def _only_role(choice: Chunk) -> bool:
    delta = choice.get("delta") or {}
    return "role" in delta and not delta.get("content") and choice.get("finish_reason") is None


def _stop_lengths(body: Body) -> tuple[int, int]:
    """(longest stop string less one, how many characters vLLM therefore holds back)."""
    stop = body.get("stop") or []
    strings = [stop] if isinstance(stop, str) else [each for each in stop if isinstance(each, str)]
    spare = max((len(each) for each in strings), default=1) - 1
    return spare, 0 if body.get("include_stop_str_in_output") else spare
