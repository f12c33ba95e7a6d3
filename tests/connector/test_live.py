"""Live answers: an engine dies in the middle of one, and the next engine finds what was generated, almost to the last
block, in vLLM's real scheduler."""

import pytest

from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt

GENERATED = 2 * CHUNK + BLOCK
STEPS_OF_A_SAVE = 4  # from a token's step to the commit of its block: the next token, offer, job, report


def begin(node: Node, text: list[int], *, live: int, tokens: int, ahead: bool = False) -> Engine:
    """An engine that has said so many tokens, and is killed there: its reservations end by themselves."""
    engine = Engine(node, write_back=True, ahead=ahead)
    engine.submit("a", text, max_tokens=GENERATED, params={"live": live})
    while len(engine.tokens["a"]) < tokens:
        engine.step()
    node.reserved.clear()
    node.leases.clear()
    return engine


def go_on(node: Node, text: list[int], *, live: int, left: int) -> tuple[int, list[int]]:
    """What the next engine computes of this prompt, and what it says."""
    engine = Engine(node, write_back=True)
    answer = engine.generate("b", text, max_tokens=left, params={"live": live})
    engine.assert_nothing_left()
    return len(text) - engine.half.shared.stats.pulled_tokens, answer


@pytest.mark.parametrize(
    ("length", "ahead"), [(CHUNK - 3, False), (2 * CHUNK, True), (2 * CHUNK + BLOCK + 5, False)]
)
def test_at_most_two_blocks_are_computed_again_wherever_it_breaks_off(length, ahead) -> None:
    """Mutant: only whole chunks are saved, or only asked for. Then up to a chunk is computed again."""
    text = prompt(1, length)
    whole = Engine(Node()).generate("a", text, max_tokens=GENERATED)
    for tokens in range(STEPS_OF_A_SAVE, GENERATED, 7):
        node = Node()
        said = begin(node, text, live=0, tokens=tokens, ahead=ahead).tokens["a"]
        assert said == whole[: len(said)]
        computed, rest = go_on(node, [*text, *said], live=len(said), left=GENERATED - len(said))
        assert said + rest == whole
        assert computed <= 2 * BLOCK, f"{computed} tokens after {len(said)}"


def test_the_second_of_them_may_die_as_well() -> None:
    text = prompt(1, CHUNK + 5)
    whole = Engine(Node()).generate("a", text, max_tokens=GENERATED)
    node, said = Node(), list[int]()
    for _ in range(6):
        engine = begin(node, [*text, *said], live=len(said), tokens=21)
        said += engine.tokens["a"]
        computed, rest = go_on(node, [*text, *said], live=len(said), left=GENERATED - len(said))
        assert said + rest == whole and computed <= 2 * BLOCK


def test_pieces_are_cold_and_chunks_are_not() -> None:
    node = Node()
    Engine(node, write_back=True).generate(
        "a", prompt(1, CHUNK), max_tokens=2 * CHUNK + 1, params={"live": 0}
    )
    sizes = {(stored.size_bytes // 2, stored.cold) for stored in node.objects.values()}
    assert sizes == {(CHUNK, False), (BLOCK, True)}


def test_a_prompt_that_nobody_has_pieces_of_is_computed() -> None:
    """A client may say what it likes."""
    text = prompt(1, 3 * CHUNK + 5)
    alone = Engine(Node()).generate("a", text)
    node = Node()
    Engine(node).generate("a", text)
    for live in (1, 10_000):
        engine = Engine(node)
        assert engine.generate("b", text, params={"live": live}) == alone
        assert engine.half.shared.stats.pulled_tokens in {2 * CHUNK, 3 * CHUNK}
        engine.assert_nothing_left()
