"""A client's request, and the requests to engines that come of it. Pure.

Prefill gets the same prompt with one token to generate and nothing of what concerns later tokens; decode gets
the client's own body plus the hand-off. Only a stream that might be continued elsewhere is asked for the ids of
its tokens (`return_token_ids`), which are what makes an exact continuation possible; see `answer`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Body = dict[str, Any]


class Endpoint(StrEnum):
    """What can be asked; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


# Of no use for a prompt, or refused together with max_tokens=1 or without a stream.
NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "stream_interval",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_prompt_text",
)

# Each depends on what was generated before in a way that a prompt cannot carry, or is counted from the answer's
# beginning. A value that is listed here as harmless switches it off.
NOT_CONTINUED: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "logprobs": (None, False),
    "prompt_logprobs": (None,),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "watermarking": (None, False),
    "spaces_between_special_tokens": (None, True),
    "vllm_xargs": (None, {}),
}
# Of the connector (docs/CONNECTOR.md): the answer may have to go on elsewhere, and so many tokens of it are prompt.
LIVE = "live"
# A hint for whoever pulls the prompt last, which prefill does not.
CONSUME_ONCE = "consume_once"
COMPLETION_TOKENS_DEFAULT = 16  # of OpenAI's API, and vLLM's


@dataclass(frozen=True)
class Ask:
    """One request of a client."""

    endpoint: Endpoint
    body: Body

    @property
    def streams(self) -> bool:
        """Whether the answer comes token by token."""
        return bool(self.body.get("stream"))

    @property
    def shows_token_ids(self) -> bool:
        """Whether the client itself asked for ids."""
        return bool(self.body.get("return_token_ids"))

    @property
    def obstacle(self) -> str:
        """Why an answer to this cannot be continued by another engine, in words; empty if it can."""
        if not self.streams:
            return "it is not streamed"
        for name, harmless in NOT_CONTINUED.items():
            value = self.body.get(name)
            # 0 == False, but `logprobs: 0` asks for some
            if not any(
                value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless
            ):
                return f"{name} is set"
        if self.endpoint is Endpoint.COMPLETIONS:
            return "" if _single_prompt(self.body.get("prompt")) else "it has several prompts"
        return "" if _only_text(self.body.get("messages")) else "it has parts that are not text"

    def prefill_body(self) -> Body:
        """Computes the prompt and one token."""
        body = {name: value for name, value in self.body.items() if name not in NOT_FOR_PREFILL}
        body["max_tokens"] = 1
        if own := _parameters(body):
            body["kv_transfer_params"] = {name: value for name, value in own.items() if name != CONSUME_ONCE}
        if self.endpoint is Endpoint.CHAT:
            body["max_completion_tokens"] = 1
        return body | {"stream": False}

    def decode_body(self, hand_off: Body | None) -> Body:
        """The client's request with the hand-off in it."""
        body = dict(self.body)
        more: Body = {}
        if not self.obstacle:
            body["return_token_ids"] = True
            more[LIVE] = 0
        if hand_off is not None and _can_carry(self.endpoint, body):
            more |= hand_off
        return body | {"kv_transfer_params": _parameters(body) | more} if more else body

    def continuation_body(self, prompt_ids: list[int], generated: list[int]) -> Body:
        """What another engine is asked for when `generated` is the beginning of its answer."""
        body = self.body | {"return_token_ids": True}
        body.pop("truncate_prompt_tokens", None)  # these ids are what was left
        more: Body = {LIVE: len(generated)}
        if self.endpoint is Endpoint.COMPLETIONS:
            body["prompt"] = prompt_ids + generated
            if body.get("max_tokens") is None:
                body["max_tokens"] = COMPLETION_TOKENS_DEFAULT
        else:  # vLLM takes these ids for the prompt instead of rendering the messages
            more["prompt_token_ids"] = prompt_ids + generated
        body["kv_transfer_params"] = _parameters(body) | more
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            if body.get(name) is not None:
                body[name] = max(0, body[name] - len(generated))
        return body


def _single_prompt(prompt: object) -> bool:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(each, int) for each in prompt)
    )


def _parameters(body: Body) -> Body:
    """What the client itself says to the connector."""
    own = body.get("kv_transfer_params")
    return own if isinstance(own, dict) else {}


def _can_carry(endpoint: Endpoint, body: Body) -> bool:
    """A hand-off is of one prompt."""
    return endpoint is Endpoint.CHAT or _single_prompt(body.get("prompt"))


def _only_text(messages: object) -> bool:
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
