"""What a request generates, as links: the chain goes on behind its prompt, so that a later prompt can find it.

    tokens   | chunk 0 | chunk 1 | chunk 2 | chunk 3 | end |      `end`: whole engine blocks, when the request ends
              prompt ...... tail |
                     generated .....................................

A generated token counts once the one that follows it is known: only then is its KV certainly in its block, and
certainly its own. The last one sampled has none yet. Of drafted tokens vLLM's request has only those that were
accepted, and the KV of the one behind them is written by the next step over that of a draft. All of that also holds
where steps are scheduled ahead of their results.

A *live* answer is one that another engine may have to continue in the middle (docs/PROXY.md). Beside its chunks it
is cut into pieces of one engine block each, from the chunk on in which the prompt ends:

    live     | chunk 0 |. . . . .|. . . . .|. . . . .|. .          `.`: a piece; its parent is the piece before it, or
                                                                   the chunk that ends where it begins
"""

from collections.abc import Sequence

from connector.keys import Chain, Link


class Growth:
    """The links of one request behind those of its prompt.

    Args:
        chain: of the request.
        prompt: the links of its prompt.
        live: in pieces as well.
    """

    def __init__(self, chain: Chain, prompt: Sequence[Link], *, live: bool) -> None:
        self._chain = chain
        self._prompt_stop = chain.request.num_prompt_tokens
        self._whole = next((link for link in reversed(prompt) if not link.tail), None)
        self._live = live and chain.block_tokens < chain.chunk_tokens
        resumed = bool(prompt) and self._live and prompt[-1].stop - prompt[-1].start == chain.block_tokens
        self._piece = prompt[-1] if resumed and prompt[-1].tail else self._whole

    @property
    def final_tokens(self) -> int:
        """How many of the request's first tokens are what they are for good, each with its KV if it was computed."""
        return max(self._prompt_stop, int(self._chain.request.num_tokens) - 1)

    @property
    def next_stop(self) -> int:
        """Where the next link will end."""
        chunk, block = self._chain.chunk_tokens, self._chain.block_tokens
        whole = _stop(self._whole) + chunk
        return min(whole, _stop(self._piece) + block) if self._live else whole

    def grow(self, num_tokens: int) -> list[Link]:
        """The links that have become whole since the last call, now that the first `num_tokens` are final."""
        grown: list[Link] = []
        while True:
            whole_stop = _stop(self._whole) + self._chain.chunk_tokens
            piece_stop = _stop(self._piece) + self._chain.block_tokens
            if self._live and piece_stop <= min(whole_stop, num_tokens):
                first = _stop(self._piece) % self._chain.chunk_tokens == 0
                before = self._whole if first else self._piece
                self._piece = self._chain.link(before, piece_stop - self._chain.block_tokens, piece_stop)
                grown.append(self._piece)
            elif whole_stop <= num_tokens:
                self._whole = self._chain.link(self._whole, whole_stop - self._chain.chunk_tokens, whole_stop)
                grown.append(self._whole)
            else:
                return grown

    def end(self, num_tokens: int) -> Link | None:
        """What of the first `num_tokens` is in no chunk, once there will be no more of them."""
        start, stop = _stop(self._whole), num_tokens - num_tokens % self._chain.block_tokens
        if self._live or stop <= max(start, self._prompt_stop):
            return None
        return self._chain.link(self._whole, start, stop)


def _stop(link: Link | None) -> int:
    return 0 if link is None else link.stop
