"""What engines, nodes and vLLM itself count is the same, and nothing is left behind, after many mixed requests.

Conversations that grow turn by turn and share their beginnings are asked for several at a time and in any order;
some are given up by their client at any moment, and the engine forgets its own prefix cache again and again. Each
answer is compared with that of the same engine under a cache salt of its own.

In the long rounds (`make soak`) loads are damaged as well: bits flip in the node's arena, always behind the first
object of a chain, because a load of which nothing remains is queried again by vLLM, and counted twice there.
"""

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from deploy.demo.engine import Engine
from deploy.demo.node import Node
from kvstore.client import KVStore, Resident
from kvstore.core import Key, Namespace, limits
from tests.e2e.support import complete_ids, external, prompt_text, transfer_config, wait_for_nothing_held
from tests.faults.support import ArenaWindow, extents_of
from tests.faults.support import Engine as Reader
from tests.support import free_port, wait_until

pytestmark = pytest.mark.e2e

GENERATED_TOKENS = 4
CHUNK_TOKENS = 256
ANSWER_TOKENS = 270
OPENING_CHARACTERS, TURN_CHARACTERS, TURNS = 1_400, 500, 3
AT_ONCE = 4
GIVEN_UP_SHARE = 0.15
PULLED_SHARE_MIN = 0.5


@dataclass
class Talk:
    """What is asked of an engine, and what it answers without the store."""

    engine: Engine
    node: Node
    rng: random.Random
    prompts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    asked: int = 0
    given_up: int = 0

    def compute_answers(self, text: str, conversations: int) -> None:
        """Each conversation, turn by turn, under a salt of its own: nothing of it is found in the store."""
        before = self.pulled()
        for number in range(conversations):
            start = number * len(text) // conversations
            prompt = text[start : start + OPENING_CHARACTERS]
            for turn in range(1, TURNS + 1):
                answer = self.engine.complete(prompt, GENERATED_TOKENS, salt=f"baseline {number}")
                assert answer is not None
                self.prompts.append(prompt)
                self.answers.append(answer)
                prompt += answer + text[start + turn * TURN_CHARACTERS :][:TURN_CHARACTERS]
        assert self.pulled() == before, "the baseline was computed"

    def pulled(self) -> int:
        """Prompt tokens that vLLM says it was given."""
        return self.engine.tokens_by_source()["external_kv_transfer"]

    def ask_one(self, number: int, patience_s: float | None) -> None:
        """A prompt of the conversations; its client waits as long as it likes."""
        if patience_s is None:
            assert self.engine.complete(self.prompts[number], GENERATED_TOKENS) == self.answers[number]
            return
        answer = self.engine.complete(self.prompts[number], GENERATED_TOKENS, patience_s=patience_s)
        assert answer in {None, self.answers[number]}
        self.given_up += answer is None

    def ask_many(self, requests: int) -> None:
        """So many requests, a few at a time."""
        with ThreadPoolExecutor(AT_ONCE) as clients:
            for _ in range(requests // AT_ONCE):
                asked = [
                    clients.submit(self.ask_one, self.rng.randrange(len(self.prompts)), self.patience_s())
                    for _ in range(AT_ONCE)
                ]
                for one in asked:
                    one.result()
                self.asked += AT_ONCE
                if self.rng.random() < 0.7:
                    self.engine.forget_local_prefixes()

    def patience_s(self) -> float | None:
        """How long the next client waits: until its answer comes, or not quite so long."""
        return self.rng.uniform(0.02, 1.0) if self.rng.random() < GIVEN_UP_SHARE else None

    def counted(self) -> dict[str, int]:
        """Tokens as the node was told of them."""
        names = ("queried", "promised", "pulled")
        counts = {name: int(self.node.gauge("kvstore_tokens_total", outcome=name)) for name in names}
        return counts | {"missed": int(self.node.gauge("kvstore_missed_tokens_total"))}

    def assert_counters_agree(self) -> None:
        """The node's and vLLM's, token by token."""
        wait_until(self.no_block_is_referenced, 60, "all blocks of the engine to be free")
        queried, promised = external(self.engine)
        wait_until(lambda: self.counted()["queried"] >= queried, 10, "the last reports to come")
        counted = self.counted()
        print(f"{self.given_up} given up; {counted}; vLLM: {queried} queried, {promised} hits")
        assert (counted["queried"], counted["promised"]) == (queried, promised)
        assert counted["pulled"] + counted["missed"] == counted["queried"]
        wait_until(lambda: self.metric("queried_tokens_total") >= queried, 10, "the engine's own metrics")
        assert {name: self.metric(f"{name}_tokens_total") for name in counted} == counted

    def no_block_is_referenced(self) -> bool:
        """After one more step of the engine. What only its prefix cache remembers is free."""
        self.engine.complete("So that the engine takes another step.", 1)
        return self.engine.metric("vllm:kv_cache_usage_perc") == 0

    def metric(self, name: str, **labels: str) -> int:
        """One of the connector's in the engine's /metrics."""
        return int(self.engine.metric(f"vllm:kvstore_{name}", **labels))


@pytest.fixture
def talk(model_path: Path, tmp_path: Path) -> Iterator[Talk]:
    with contextlib.ExitStack() as exits:
        node = Node(free_port(), free_port(), tmp_path)
        exits.callback(node.stop)
        node.wait_ready()
        config = transfer_config(node.control, write_back=True)
        engine = Engine("engine", model_path, free_port(), tmp_path, store=config)
        exits.callback(engine.stop)
        engine.wait_ready()
        yield Talk(engine, node, random.Random(3))


def assert_the_next_turn_pulls_the_answer(talk: Talk, text: str) -> None:
    """Nothing but what the user has added, and the chunk that the answer has left unfinished, is computed again."""
    chunks = talk.node.gauge("kvstore_objects", tier="dram")
    prompt, answer, _ = complete_ids(talk.engine, text[:1_120], ANSWER_TOKENS)
    turn = [*prompt, *answer, *complete_ids(talk.engine, "What came next?", 1).prompt]
    whole = (len(prompt) + ANSWER_TOKENS - 1) // CHUNK_TOKENS
    assert len(prompt) <= (whole - 1) * CHUNK_TOKENS, "there is no chunk of generated tokens alone"
    wait_until(
        lambda: talk.node.gauge("kvstore_objects", tier="dram") >= chunks + whole,
        30,
        "the answer to be saved",
    )
    alone = complete_ids(talk.engine, turn, GENERATED_TOKENS, salt="alone").answer
    talk.engine.forget_local_prefixes()
    before = talk.pulled()
    pulling = complete_ids(talk.engine, turn, GENERATED_TOKENS)
    assert pulling.answer == alone
    assert talk.pulled() - before == whole * CHUNK_TOKENS
    wait_until(lambda: talk.node.reports(pulling.request), 10, "the report of that request")
    [report] = talk.node.reports(pulling.request)
    assert (report["queried"], report["pulled"]) == (len(turn), whole * CHUNK_TOKENS)
    assert talk.metric("saved_tokens_total") >= whole * CHUNK_TOKENS
    for stage in ("lookup", "lease", "load", "reserve", "save", "commit"):
        assert talk.metric("seconds_count", stage=stage) > 0, stage


def test_what_is_counted_is_the_same_everywhere_and_nothing_is_left(talk: Talk, repository: Path) -> None:
    assert_the_next_turn_pulls_the_answer(talk, prompt_text(repository, "tides"))
    talk.compute_answers(prompt_text(repository, "canal"), 4)
    before = talk.counted()
    talk.ask_many(40)
    wait_for_nothing_held(talk.node, 60)
    talk.assert_counters_agree()
    assert talk.given_up > 0
    counted = talk.counted()
    asked = {name: counted[name] - before[name] for name in counted}
    assert asked["pulled"] > PULLED_SHARE_MIN * asked["queried"], "little was had from the store"


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_that_holds_when_bits_flip_as_well(talk: Talk, repository: Path) -> None:
    """300 requests, of whose loads at least 50 find an object whose bytes have changed."""
    talk.compute_answers(prompt_text(repository, "canal"), 8)
    before = talk.counted()
    with Flipper(talk.node, talk.rng) as flipper:
        while talk.asked < 300 or flipper.found() < 50:
            assert talk.asked < 1_200, f"only {flipper.found()} loads were disturbed"
            flipper.flip(3)
            talk.ask_many(AT_ONCE)
        wait_for_nothing_held(talk.node, 60)
        print(f"{talk.asked} requests; {flipper.found()} flipped objects found by loads")
    talk.assert_counters_agree()
    counted = talk.counted()
    assert counted["pulled"] < counted["promised"], "no load was disturbed"
    asked = {name: counted[name] - before[name] for name in counted}
    assert asked["pulled"] > PULLED_SHARE_MIN * asked["queried"], "little was had from the store"


class Flipper:
    """Changes bits in the memory of a node, behind the first object of a chain."""

    def __init__(self, node: Node, rng: random.Random) -> None:
        self._node = node
        self._rng = rng
        name = node.objects()[0]["namespace"]
        with KVStore(node.control) as store:
            manifest = store.manifest(Namespace(bytes.fromhex(name)))
        assert manifest is not None
        self._reader = Reader(node.control, manifest)
        self._arena = ArenaWindow(node, limits.MIB)

    def flip(self, objects: int) -> None:
        """One bit in each of so many objects, wherever they are."""
        behind = [view for view in self._node.objects() if view["depth"] > 0]
        for view in self._rng.sample(behind, min(objects, len(behind))):
            promise = self._reader.acquire([Key(bytes.fromhex(view["key"]))])
            for copy in promise.copies:
                assert isinstance(copy.answer, Resident)
                at = self._rng.randrange(copy.answer.size_bytes)
                self._arena.flip(extents_of(copy.answer.extents), at)
            self._reader.release(promise)

    def found(self) -> int:
        """Objects that the node has dropped, because a load had found them changed."""
        return int(self._node.gauge("kvstore_checksum_failures_total"))

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._reader.__exit__(*ended)
        self._arena.__exit__(*ended)
