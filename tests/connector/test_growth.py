"""Links behind a prompt: those that a later prompt, or an engine that goes on with the answer, will ask for."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector.growth import Growth
from connector.keys import Chain, Link
from kvstore.core import Namespace
from tests.connector.support import feature

NAMESPACE = Namespace(b"n" * 32)
CHUNK, BLOCK = 64, 16
TOKENS = [number * 7 % 501 + 1 for number in range(400)]
LENGTHS = [1, 15, 16, 17, 48, 63, 64, 65, 80, 127, 128, 150]
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "picture": {"mm_features": [feature("cat", 3, 70)]},
    "salt": {"cache_salt": "s"},
}


class Writing:
    """A request that generates TOKENS behind its prompt, one at a time."""

    def __init__(
        self, length: int, *, live: bool = False, resumed: int = 0, block: int = BLOCK, **more: Any
    ) -> None:
        extras = {"cache_salt": None, "mm_features": [], "prompt_embeds": None} | more
        self.request = SimpleNamespace(all_token_ids=TOKENS[:length], num_prompt_tokens=length, **extras)
        self.request.num_tokens = length
        chain = Chain(self.request, NAMESPACE, CHUNK, block)
        self.prompt = chain.resumed_prompt(resumed) if resumed else chain.prompt()
        self.growth = Growth(chain, self.prompt, live=live)
        self.grown: list[Link] = []

    def generate(self, until: int) -> None:
        """Tokens, each of which a step computes."""
        while self.request.num_tokens < until:
            self.request.num_tokens += 1
            self.request.all_token_ids = TOKENS[: self.request.num_tokens]
            self.grown += self.growth.grow(self.growth.final_tokens)


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_of_an_answer_are_those_of_the_prompt_that_holds_it(length, extras) -> None:
    """Mutant: the answer's first chunk hangs on the prompt's tail."""
    writing = Writing(length, **extras)
    writing.generate(300)
    later = [link for link in Writing(299, **extras).prompt if not link.tail]
    assert [*(link for link in writing.prompt if not link.tail), *writing.grown] == later


@pytest.mark.parametrize("length", LENGTHS)
def test_the_end_of_an_answer_is_the_tail_of_exactly_that_text(length) -> None:
    for until in range(length, length + 70):
        writing = Writing(length)
        writing.generate(until)
        final = writing.growth.final_tokens
        end = writing.growth.end(final)
        tail = Writing(final).prompt[-1:]
        expected = tail if tail and tail[0].tail and tail[0].stop > length else ()
        assert ((end,) if end else ()) == expected


@pytest.mark.parametrize("block", [BLOCK, CHUNK // 2, CHUNK])
@pytest.mark.parametrize("length", LENGTHS)
def test_who_goes_on_with_a_live_answer_asks_for_what_was_written(length, block) -> None:
    """Wherever it broke off. Whole chunks are asked for only where they were whole for the length of a chunk, so that
    the last one may be missing. Mutant: pieces hang on pieces across chunks, and nothing fits after the first."""
    writing = Writing(length, live=True, block=block)
    written = {link.key: link for link in writing.prompt}
    for until in range(length + 1, length + 3 * CHUNK):
        writing.generate(until)
        written |= {link.key: link for link in writing.grown}
        reading = Writing(until, resumed=until - length, block=block).prompt
        assert [link.start for link in reading[1:]] == [link.stop for link in reading[:-1]]
        assert until - (reading[-1].stop if reading else 0) < block
        missing = [link for link in reading if link.key not in written]
        assert all(link.stop > until - 1 for link in missing), (
            "only what holds the last token, which has no KV"
        )
        if block < CHUNK:
            young = [link for link in reading if link.stop > max(length, until - CHUNK)]
            assert all(link.stop - link.start == block for link in young)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_second_engine_writes_for_the_third(length) -> None:
    for breaks_at in range(length + 1, length + 140, 7):
        second = Writing(breaks_at, live=True, resumed=breaks_at - length)
        written = {link.key for link in second.prompt}
        for until in range(breaks_at + 1, breaks_at + CHUNK + 20, 5):
            second.generate(until)
            written |= {link.key for link in second.grown}
            third = Writing(until, resumed=until - length).prompt
            assert all(link.key in written for link in third if link.stop < until)


def test_what_is_not_live_has_no_pieces() -> None:
    writing = Writing(20)
    writing.generate(300)
    assert all(link.stop - link.start == CHUNK for link in writing.grown)
