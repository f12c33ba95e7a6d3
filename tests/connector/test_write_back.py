"""Saves of what engines generate, in vLLM's real scheduler: only KV that is final, and the next turn finds it.

The model of `tests.connector.support` looks at every token's KV that attention would read, so a fresh engine that
goes on from a stored answer fails by itself if any of it is not what the tokens' KV must be.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.config import SpeculativeConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from kvstore.core import MissReason
from tests.connector.support import BLOCK, CHUNK, Engine, Node, kv_of, prompt

PROMPT = prompt(1, CHUNK - 3)
MORE = prompt(2, BLOCK + 5)
ANSWER = 2 * CHUNK  # its last token has no KV: 188 tokens do, of which 176 fill blocks


@pytest.fixture
def node() -> Node:
    return Node()


def writer(node: Node, **more: Any) -> Engine:
    return Engine(node, write_back=True, **more)


def tokens(node: Node) -> list[int]:
    """The sizes of what is stored, in tokens."""
    return sorted(stored.size_bytes // 2 for stored in node.objects.values())


def next_turn(node: Node, turn: Sequence[int], **more: Any) -> int:
    """Tokens that a fresh engine pulls of this prompt, whose answer must be that of an engine without a store."""
    engine = Engine(node)
    answer = engine.generate("next", turn, **more)
    engine.assert_nothing_left()
    assert answer == Engine(Node()).generate("alone", turn)
    return engine.half.shared.stats.pulled_tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("length", [1, BLOCK, CHUNK - 3, CHUNK, CHUNK + 1, 2 * CHUNK + BLOCK])
def test_the_next_turn_pulls_the_answer(node, ahead, length) -> None:
    """Mutants: the chain goes on behind the prompt's tail; the last token, which has no KV yet, is saved."""
    engine = writer(node, ahead=ahead)
    first = prompt(1, length)
    for count in (ANSWER, ANSWER + 1):  # with either, one of them ends at the end of a block
        answer = engine.generate(f"a{count}", [*first, count], max_tokens=count)
        engine.assert_nothing_left()
        turn = [*first, count, *answer, *MORE]
        final = len(first) + count
        assert next_turn(node, turn) == final - final % CHUNK


def test_what_an_answer_leaves_in_the_store(node) -> None:
    engine = writer(node)
    answer = engine.generate("a", PROMPT, max_tokens=ANSWER)
    assert tokens(node) == [3 * BLOCK, 3 * BLOCK, CHUNK, CHUNK]
    cold = [stored.size_bytes // 2 for stored in node.objects.values() if stored.cold]
    assert cold == [3 * BLOCK, 3 * BLOCK], "the tails of prompt and answer"
    engine.assert_nothing_left()
    assert next_turn(node, [*PROMPT, *answer]) == 11 * BLOCK, "the very same tokens: with the answer's tail"


def test_chunks_go_while_the_answer_is_still_being_generated(node) -> None:
    engine = writer(node)
    engine.submit("a", PROMPT, max_tokens=10 * CHUNK)
    while len(engine.tokens["a"]) < CHUNK:
        engine.step()
    assert tokens(node) == [3 * BLOCK, CHUNK]
    engine.abort("a")
    engine.run()
    assert tokens(node) == [3 * BLOCK, CHUNK], "the client has gone: nothing more is made of it"
    engine.assert_nothing_left()


def test_only_prompts_are_saved_unless_told(node) -> None:
    engine = Engine(node)
    engine.generate("a", PROMPT, max_tokens=ANSWER)
    assert tokens(node) == [3 * BLOCK]
    engine.assert_nothing_left()


def test_an_engine_that_only_loads_writes_nothing_back(node) -> None:
    engine = writer(node, role="kv_consumer")
    engine.generate("a", PROMPT, max_tokens=ANSWER)
    assert not node.calls.count("reserve")
    engine.assert_nothing_left()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
def test_preempted_answers_are_saved_right(node, ahead) -> None:
    engine = writer(node, num_blocks=30, max_batched=2048, prefix_caching=False, ahead=ahead)
    texts = [prompt(number, 9 * BLOCK) for number in range(3)]
    for number, text in enumerate(texts):
        engine.submit(f"a{number}", text, max_tokens=8 * BLOCK)
    preempted = 0
    for _ in range(100):
        engine.step()
        preempted = max([r.num_preemptions for r in engine.scheduler.requests.values()] + [preempted])
    assert preempted, "nothing was preempted: the test shows nothing"
    engine.run(2_000)
    engine.assert_nothing_left()
    for number, text in enumerate(texts):
        assert next_turn(node, [*text, *engine.tokens[f"a{number}"], *MORE]) == 4 * CHUNK


def test_an_answer_amid_which_the_weights_change_is_not_saved(node) -> None:
    engine = writer(node)
    engine.submit("a", PROMPT, max_tokens=ANSWER)
    while len(engine.tokens["a"]) < CHUNK // 2:
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    node.objects.clear()
    engine.run()
    assert not node.objects
    engine.assert_nothing_left()


def test_answers_take_no_more_blocks_than_saves_may_hold(node) -> None:
    engine = writer(node, num_blocks=41, pinned_share=0.2)  # 8 blocks
    engine.worker.hold_saves = True
    engine.submit("a", PROMPT, max_tokens=3 * CHUNK)
    while engine.scheduler.requests:
        engine.step()
        assert engine.half.saves.pinned_blocks <= 0.2 * 41
    engine.worker.hold_saves = False
    engine.run()
    dropped = engine.half.shared.stats.dropped
    assert dropped == {"saves under way hold as many KV blocks as pinned_share allows": 3}
    engine.assert_nothing_left()


def test_a_store_that_refuses_costs_the_answer_nothing(node) -> None:
    alone = Engine(Node()).generate("a", PROMPT, max_tokens=ANSWER)
    engine = writer(node)
    node.refuse = MissReason.NO_ROOM
    assert engine.generate("a", PROMPT, max_tokens=ANSWER) == alone
    assert not node.objects
    engine.assert_nothing_left()


def test_the_hand_off_of_a_turn_covers_its_answer(node) -> None:
    """A client that takes it into its next turn waits for what is still on its way."""
    engine = writer(node)
    engine.worker.hold_saves = True
    engine.submit("a", PROMPT, max_tokens=ANSWER)
    while engine.scheduler.requests:
        engine.step()
    note = engine.params["a"]
    assert note["kvstore"]["tokens"] == 11 * BLOCK
    other = Engine(node)
    other.submit("b", [*PROMPT, *engine.tokens["a"], *MORE], params=note)
    for _ in range(3):
        other.step()
    engine.worker.hold_saves = False
    engine.run()
    other.run(tick_s=0.1)
    assert other.half.shared.stats.pulled_tokens == 2 * CHUNK
    other.assert_nothing_left()
    engine.assert_nothing_left()


# --- drafts -------------------------------------------------------------------------------------------


class Drafting(Engine):
    """An engine whose drafts are right now and then. Its model writes the KV of every draft, right or wrong."""

    DRAFTS = 3
    accepted = rejected = 0

    def _config(self, *args: Any) -> Any:
        config = super()._config(*args)
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=self.DRAFTS,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        return config

    def _execute(self, output: Any) -> ModelRunnerOutput:
        self._drafted = {name: len(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}
        return super()._execute(output)

    def _compute(self, name: str, num_tokens: int) -> list[int]:
        drafts = self._drafted.get(name, 0)
        request = self.scheduler.requests[name]
        known = self.model_tokens[name]
        # where the scheduler runs ahead, it believes that every draft is accepted
        start = min(request.num_computed_tokens - num_tokens, len(known) - 1)
        stop = start + num_tokens
        if stop - drafts < len(known):
            self._attend(name, start, stop, known)
            return []
        sampled = [self._sample(request, known)]
        while len(sampled) <= drafts:
            wrong = sampled[-1] % self.DRAFTS == 0  # this draft is not what the model says
            if wrong:
                break
            sampled.append(self._sample(request, [*known, *sampled]))
        inputs = [*known, *sampled[:-1]]
        inputs += [999_999] * (stop - len(inputs))  # rejected drafts
        self._attend(name, start, stop, inputs)
        self.accepted += len(sampled) - 1
        self.rejected += drafts - (len(sampled) - 1)
        known += sampled
        return sampled

    def _attend(self, name: str, start: int, stop: int, inputs: Sequence[int]) -> None:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        values = kv_of(self.scheduler.requests[name], inputs)
        for position in range(stop):
            row, column = self.worker.memory[table[position // BLOCK]], position % BLOCK
            if position >= start:
                row[column] = values[position]
            assert row[column] == values[position], f"{name}: wrong KV at token {position}"

    def _sample(self, request: Any, before: Sequence[int]) -> int:
        return int.from_bytes(kv_of(request, before)[-1][:2], "big") % 1000 + 1

    def _settle(self) -> None:
        super()._settle()
        if not self._ahead:
            running = [r.request_id for r in self.scheduler.running]
            drafts = [[1] * self.DRAFTS for _ in running]  # what they are, only the model knows
            self.scheduler.update_draft_token_ids(DraftTokenIds(running, drafts))


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
def test_drafts_that_were_not_accepted_are_never_saved(node, ahead) -> None:
    """Mutant: what was computed is final. Then blocks are saved with KV of drafts, or of the token behind a draft."""
    texts = [prompt(number, CHUNK - 3 + number) for number in range(8)]
    engine = Drafting(node, ahead=ahead, write_back=True)
    alone = [Engine(Node()).generate("a", text, max_tokens=ANSWER) for text in texts]
    for number, text in enumerate(texts):
        engine.submit(f"a{number}", text, max_tokens=ANSWER)
    engine.run(1_000)
    assert engine.accepted > 100 and engine.rejected > 100
    engine.assert_nothing_left()
    for number, text in enumerate(texts):
        answer = engine.tokens[f"a{number}"]
        assert answer == alone[number]
        final = len(text) + ANSWER - 1
        assert next_turn(node, [*text, *answer, *MORE]) == final - final % CHUNK
