"""The real scheduler where a prefill sees nothing of what lies before it: MLA on CPU without AMX.

The fake model refuses what vLLM would compute wrongly there: more than one token behind others. Mutants that must
fail here: a promise that leaves two tokens; a promise in part; a load that failed in part and whose first blocks are
kept.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from connector.metadata import Handshake, LoadJob, LoadReport
from kvstore.core import MissReason
from tests.connector.support import BLOCK, CHUNK, LAYERS, Engine, Node, Worker, prompt

HAND = Handshake("cpu-mla", "float32", 1, LAYERS)
WHOLE = 3 * CHUNK + 2 * BLOCK  # a prompt of whole blocks: three chunks, and a tail


class WholeWorker(Worker):
    """Reports a failed load as the worker half does if it is of no use in part."""

    def _load(self, job: LoadJob, output: Any) -> LoadReport:
        report = super()._load(job, output)
        assert job.all_or_nothing
        output.invalid_block_ids = set()
        if report.valid < len(job.objects) or not job.objects:
            output.failed_recving.add(job.request)
        return report


class LastTokenEngine(Engine):
    """One that can decode behind a hit, but not prefill."""

    def __init__(self, node: Node, **more: Any) -> None:
        super().__init__(node, shake_hands=False, prefix_caching=False, max_batched=4096, **more)
        self.worker = WholeWorker(node, self.kv_cache_config.num_blocks)
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): HAND})
        assert self.half.session.unsupported is None

    def _compute(self, name: str, num_tokens: int) -> list[int]:
        computed = self.scheduler.requests[name].num_computed_tokens - num_tokens
        assert computed == 0 or num_tokens == 1, f"a prefill of {num_tokens} tokens behind {computed}"
        return super()._compute(name, num_tokens)

    @property
    def pulled(self) -> int:
        return self.half.shared.stats.pulled_tokens

    @property
    def misses(self) -> dict[MissReason, int]:
        return {reason: count for reason, count in self.half.shared.stats.misses.items() if count}


@pytest.fixture
def node() -> Node:
    return Node()


def push(node: Node, length: int = WHOLE) -> None:
    writer = LastTokenEngine(node)
    writer.generate("w", prompt(1, length))
    writer.assert_nothing_left()


@pytest.mark.parametrize("length", range(WHOLE - BLOCK, WHOLE + BLOCK + 4))
def test_only_what_leaves_one_token_is_promised(node, length) -> None:
    """Of every length between whole blocks. The last token of a whole hit is computed, too."""
    expected = LastTokenEngine(node).generate("w", prompt(1, length))
    reader = LastTokenEngine(node)
    calls = len(node.calls)
    assert reader.generate("r", prompt(1, length)) == expected
    whole = length // BLOCK * BLOCK
    assert reader.pulled == (whole if length - whole <= 1 else 0)
    if not reader.pulled:
        assert reader.misses == {MissReason.LAYOUT_UNSUPPORTED: 1}
        assert not {"lookup", "acquire"} & set(node.calls[calls:])
    reader.assert_nothing_left()


def test_a_longer_prompt_is_computed_whole(node) -> None:
    push(node)
    reader = LastTokenEngine(node)
    reader.generate("r", [*prompt(1, WHOLE), *prompt(2, CHUNK)])
    assert (reader.pulled, set(reader.misses)) == (0, {MissReason.NEVER_STORED})
    reader.assert_nothing_left()


@pytest.mark.parametrize("index_down", [False, True])
def test_nothing_is_promised_in_part(node, index_down) -> None:
    push(node)
    for key in list(node.objects):
        stored = node.objects.pop(key)
        reader = LastTokenEngine(node, save=False)
        reader.control.index_down = index_down
        reader.generate("r", prompt(1, WHOLE + 1))
        assert (reader.pulled, set(reader.misses)) == (0, {MissReason.NEVER_STORED})
        reader.assert_nothing_left()
        node.objects[key] = stored
    reader = LastTokenEngine(node, save=False)
    reader.control.index_down = index_down
    reader.generate("r", prompt(1, WHOLE + 1))
    assert reader.pulled == WHOLE


@pytest.mark.parametrize("at", range(4))
def test_a_load_that_fails_in_part_leaves_nothing(node, at) -> None:
    push(node)
    reader = LastTokenEngine(node)
    reader.worker.fail_load_at = at
    reader.generate("r", prompt(1, WHOLE + 1))
    assert (reader.pulled, reader.half.shared.stats.loads_failed) == (0, 1)
    assert len(reader.worker.seen_loads) == 1
    reader.assert_nothing_left()


def test_a_request_that_was_preempted_is_computed(node) -> None:
    """What it has generated lies behind its prompt: more than one token."""
    engine = LastTokenEngine(node, num_blocks=40)
    for number in range(4):
        engine.submit(f"r{number}", prompt(number, 8 * BLOCK + 1), max_tokens=6 * BLOCK)
    preempted = 0
    for _ in range(600):
        if not engine.scheduler.has_requests():
            break
        preempted += len(engine.step().preempted_req_ids or ())
    assert preempted, "nothing was preempted"
    engine.assert_nothing_left()


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_hand_off_waits_only_for_what_is_of_use(node, more) -> None:
    prefill = LastTokenEngine(node)
    prefill.generate("p", prompt(1, WHOLE + more), max_tokens=1)
    decode = LastTokenEngine(node)
    decode.generate("d", prompt(1, WHOLE + more), params=prefill.params["p"])
    assert decode.pulled == (WHOLE if more < 2 else 0)
    decode.assert_nothing_left()


def test_drafts_are_not_supported_there(node, caplog_vllm) -> None:
    engine = Engine(node, shake_hands=False)
    engine.config.speculative_config = SimpleNamespace()
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): HAND})
    assert caplog_vllm.text.count("speculative decoding with MLA on CPU is not supported yet") == 1
    assert engine.half.session.unsupported


def test_engines_that_see_everything_are_not_held_back(node) -> None:
    """The same prompt and store, but a prefill that sees what lies before it."""
    push(node)
    reader = Engine(node)
    reader.generate("w", prompt(1, WHOLE + 5))
    other = Engine(node)
    other.generate("r", prompt(1, WHOLE + 5))
    assert other.half.shared.stats.pulled_tokens == WHOLE
