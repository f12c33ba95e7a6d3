"""The real scheduler with models of several kinds of KV: hits, saves of what is soon gone, and all that interrupts.

A store that always misses fails at every `pulled`. Mutants that must fail here: windows saved a step later; a state
read from the block table; a load that leaves out the first block of a window; blocks reported as invalid.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from connector.control import ReserveAsk
from connector.kinds import Reach
from kvstore.core import MissReason
from tests.connector.hybrid_engine import EVERYTHING, GEMMA, MODELS, QWEN, HybridEngine
from tests.connector.support import BLOCK, CHUNK, Node, prompt

LENGTH = 5 * CHUNK + 2 * BLOCK + 5  # a tail of two blocks
TAIL = LENGTH - 5


@pytest.fixture
def node() -> Node:
    return Node()


def pulled(engine: HybridEngine) -> int:
    return engine.half.shared.stats.pulled_tokens


def committed(node: Node) -> int:
    return len(node.objects)


@pytest.mark.parametrize("max_batched", [4096, 128, 48])
@pytest.mark.parametrize("model", MODELS)
def test_a_fresh_engine_goes_on_where_the_prompt_ends(node, model, max_batched) -> None:
    writer = HybridEngine(node, MODELS[model], max_batched=max_batched)
    expected = writer.generate("a", prompt(1, LENGTH))
    writer.assert_nothing_left()
    reader = HybridEngine(node, MODELS[model], max_batched=max_batched)
    assert reader.generate("b", prompt(1, LENGTH)) == expected
    assert pulled(reader) == TAIL
    assert not reader.half.shared.stats.loads_failed
    reader.assert_nothing_left()


@pytest.mark.parametrize("model", ["gemma", "llama4"])
def test_a_prompt_that_goes_on_takes_up_the_last_whole_chunk(node, model) -> None:
    HybridEngine(node, MODELS[model]).generate("a", prompt(1, LENGTH))
    reader = HybridEngine(node, MODELS[model])
    longer = [*prompt(1, LENGTH), *prompt(2, 150)]
    reader.generate("b", longer)
    assert pulled(reader) == 5 * CHUNK
    reader.assert_nothing_left()


@pytest.mark.parametrize(("retention", "hit"), [(0, 0), (2 * CHUNK, 2 * CHUNK), (CHUNK, 3 * CHUNK)])
def test_prompts_that_share_their_beginning_hit_where_windows_were_retained(node, retention, hit) -> None:
    shared = prompt(1, 3 * CHUNK + 20)
    HybridEngine(node, GEMMA, retention_tokens=retention).generate("a", [*shared, *prompt(2, 400)])
    reader = HybridEngine(node, GEMMA, retention_tokens=retention)
    reader.generate("b", [*shared, *prompt(3, 300)])
    assert pulled(reader) == hit
    reader.assert_nothing_left()


@pytest.mark.parametrize(("interval", "hit"), [(0, 0), (CHUNK, 3 * CHUNK)])
def test_states_are_shared_where_vllm_keeps_them(node, interval, hit) -> None:
    """Why docs speak of --prefix-cache-retention-interval."""
    shared = prompt(1, 3 * CHUNK + 20)
    HybridEngine(node, QWEN, interval=interval, max_batched=CHUNK).generate("a", [*shared, *prompt(2, 400)])
    reader = HybridEngine(node, QWEN, interval=interval)
    reader.generate("b", [*shared, *prompt(3, 300)])
    assert pulled(reader) == hit
    reader.assert_nothing_left()


@pytest.mark.parametrize("model", MODELS)
def test_what_the_engine_has_is_not_written_again(node, model) -> None:
    """A local hit in front of a pulled one: its blocks are shared with other requests."""
    HybridEngine(node, MODELS[model]).generate("a", prompt(1, LENGTH))
    reader = HybridEngine(node, MODELS[model], load=True)
    reader.generate("short", prompt(1, 2 * CHUNK + 3))
    before = pulled(reader)
    reader.generate("b", prompt(1, LENGTH))
    assert pulled(reader) > before
    reader.assert_nothing_left()


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_prompts(node, model) -> None:
    prompts = {
        name: [*prompt(1, 4 * CHUNK), *prompt(seed, 100 + 30 * seed)] for seed, name in enumerate("abcd")
    }
    expected = {}
    for name, tokens in prompts.items():
        expected[name] = HybridEngine(node, MODELS[model]).generate(name, tokens)
    reader = HybridEngine(node, MODELS[model], num_blocks=600)
    for name, tokens in prompts.items():
        reader.submit(name, tokens)
    reader.run()
    assert {name: reader.tokens[name] for name in prompts} == expected
    assert pulled(reader) >= 4 * 4 * CHUNK
    reader.assert_nothing_left()


def test_window_blocks_are_saved_in_the_step_that_fills_them(node) -> None:
    """vLLM takes them out of the table in the next step; references keep their bytes."""
    engine = HybridEngine(node, GEMMA, max_batched=CHUNK)
    engine.worker.hold_saves = True
    engine.submit("a", prompt(1, 8 * CHUNK + 5))
    nulled = 0
    for _ in range(9):
        engine.step()
        if "a" in engine.scheduler.requests:
            tables = engine.scheduler.kv_cache_manager.get_block_ids("a")
            nulled = max(nulled, list(tables[0]).count(0))
    assert nulled > 10, "the scheduler has not taken window blocks away"
    assert engine.half.saves.pinned_blocks > 0
    engine.worker.hold_saves = False
    engine.run()
    engine.assert_nothing_left()
    reader = HybridEngine(node, GEMMA)
    reader.generate("b", prompt(1, 8 * CHUNK + 5))
    assert pulled(reader) == 8 * CHUNK


@pytest.mark.parametrize("model", MODELS)
def test_preemption_during_a_pinned_save_poisons_nothing(node, model) -> None:
    engine = HybridEngine(node, MODELS[model], num_blocks=80, max_batched=64, pinned_share=0.9)
    engine.worker.hold_saves = True
    for number in range(6):
        engine.submit(f"r{number}", prompt(number, 130), max_tokens=120)
    preempted = 0
    for step in range(600):
        engine.worker.hold_saves = step % 8 != 0
        if not engine.scheduler.has_requests():
            break
        preempted += len(engine.step().preempted_req_ids or ())
    engine.worker.hold_saves = False
    engine.run()
    assert preempted, "nothing was preempted"
    engine.assert_nothing_left()
    reader = HybridEngine(node, MODELS[model])
    for number in range(6):
        reader.generate(f"r{number}", prompt(number, 130))
    assert pulled(reader) > 0
    reader.assert_nothing_left()


def test_an_abort_while_loading_leaves_nothing(node) -> None:
    HybridEngine(node, EVERYTHING).generate("a", prompt(1, LENGTH))
    reader = HybridEngine(node, EVERYTHING)
    reader.worker.hold_loads = True
    reader.submit("b", prompt(1, LENGTH))
    for _ in range(3):
        reader.step()
    assert reader.half.loads.under_way == 1
    reader.abort("b")
    reader.step()
    reader.worker.hold_loads = False
    reader.run()
    reader.assert_nothing_left()


@pytest.mark.parametrize("model", MODELS)
def test_a_failed_load_is_computed_and_not_tried_again(node, model) -> None:
    expected = HybridEngine(node, MODELS[model]).generate("a", prompt(1, LENGTH))
    objects = len(node.objects)
    for at in range(0, objects, 2):
        reader = HybridEngine(node, MODELS[model])
        reader.worker.fail_load_at = at
        calls = len(node.calls)
        assert reader.generate("b", prompt(1, LENGTH)) == expected
        loads = reader.worker.seen_loads
        if at < len(loads[0].objects):
            assert reader.half.shared.stats.loads_failed == 1
            assert pulled(reader) == 0
        assert len(loads) == 1
        assert node.calls[calls:].count("acquire") == 1
        reader.assert_nothing_left()


@pytest.mark.parametrize("model", MODELS)
def test_a_flipped_bit_in_any_kind_is_a_miss(node, model) -> None:
    engine = HybridEngine(node, MODELS[model])
    expected = engine.generate("a", prompt(1, LENGTH))
    probe = HybridEngine(node, MODELS[model])
    probe.generate("p", prompt(1, LENGTH))
    [job] = probe.worker.seen_loads
    for kind in range(len(engine.kinds)):
        victims = [wanted for wanted in job.objects if wanted.kind == kind]
        assert victims, f"a hit needs nothing of {engine.kinds[kind].name}"
        page = node.pages[victims[-1].generation]
        node.pages[victims[-1].generation] = (b"flipped", *page[1:])
        reader = HybridEngine(node, MODELS[model])
        assert reader.generate("b", prompt(1, LENGTH)) == expected
        assert reader.half.shared.stats.loads_failed == 1
        assert reader.control.suspects == [victims[-1].key]
        node.pages[victims[-1].generation] = page
        reader.assert_nothing_left()


@pytest.mark.parametrize("model", MODELS)
def test_without_what_one_kind_needs_a_shorter_boundary_is_hit_or_none(node, model) -> None:
    engine = HybridEngine(node, MODELS[model])
    expected = engine.generate("a", prompt(1, LENGTH))
    probe = HybridEngine(node, MODELS[model])
    probe.generate("p", prompt(1, LENGTH))
    [job] = probe.worker.seen_loads
    for index_down in (False, True):
        for wanted in job.objects:
            stored = node.objects.pop(wanted.key)
            reader = HybridEngine(node, MODELS[model], save=False)
            reader.control.index_down = index_down
            assert reader.generate("b", prompt(1, LENGTH)) == expected
            assert pulled(reader) < TAIL
            reader.assert_nothing_left()
            node.objects[wanted.key] = stored


def test_no_index_hits_where_engines_save(node) -> None:
    HybridEngine(node, EVERYTHING).generate("a", prompt(1, LENGTH))
    reader = HybridEngine(node, EVERYTHING)
    reader.control.index_down = True
    reader.generate("b", prompt(1, LENGTH))
    assert pulled(reader) == TAIL


@pytest.mark.parametrize("model", MODELS)
def test_a_hand_off_names_where_the_prompt_can_be_taken_up(node, model) -> None:
    prefill = HybridEngine(node, MODELS[model])
    prefill.generate("a", prompt(1, LENGTH), max_tokens=1)
    note = prefill.params["a"]
    assert note["kvstore"]["tokens"] == TAIL
    decode = HybridEngine(node, MODELS[model])
    decode.generate("b", prompt(1, LENGTH), params=note)
    assert pulled(decode) == TAIL
    decode.assert_nothing_left()


def test_what_is_stored_is_not_offered_again(node) -> None:
    HybridEngine(node, EVERYTHING).generate("a", prompt(1, LENGTH))
    before, calls = committed(node), len(node.calls)
    reader = HybridEngine(node, EVERYTHING)
    reader.generate("b", prompt(1, LENGTH))
    assert committed(node) == before
    assert "reserve" not in node.calls[calls:]


def test_pieces_are_children_of_the_link_at_whose_end_they_are_valid(node) -> None:
    engine = HybridEngine(node, EVERYTHING)
    asked: list[ReserveAsk] = []
    reserve = engine.control.reserve

    def noted(items: Sequence[ReserveAsk], duration_s: float) -> Any:
        asked.extend(items)
        return reserve(items, duration_s)

    engine.control.reserve = noted  # type: ignore[method-assign]
    engine.generate("a", prompt(1, LENGTH))
    by_key = {item.key: item for item in asked}
    pieces = [item for item in asked if item.parent in by_key and by_key[item.parent].depth == item.depth - 1]
    assert len(pieces) >= 3
    chain = [item for item in asked if item.size_bytes in {CHUNK // BLOCK * 32, 2 * 32}]
    assert chain
    assert {kind.reach for kind in engine.kinds} == set(Reach)


def test_an_engine_that_is_told_nothing_computes(node) -> None:
    HybridEngine(node, EVERYTHING).generate("a", prompt(1, LENGTH))
    node.down = True
    reader = HybridEngine(node, EVERYTHING, lookup_timeout_s=0.0)
    reader.generate("b", prompt(1, LENGTH))
    assert pulled(reader) == 0
    assert reader.half.shared.stats.misses[MissReason.INDEX_DOWN] == 1


SIZES = (
    BLOCK,
    CHUNK,
    2 * CHUNK,
    40,
    96,
    100,
    48,
    20,
)  # blocks, chunks, retention; windows and local attention
EDGES = sorted({multiple * size + more for size in SIZES for multiple in (1, 2, 3) for more in (-1, 0, 1, 2)})


@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_every_length_around_every_boundary(node, model) -> None:
    """Blocks, windows, chunks of either sort, retention: one more or less; the hit ends at the last whole block."""
    assert {kind.tokens for kind in HybridEngine(node, MODELS[model]).kinds} <= {0, *SIZES}
    more = {"num_blocks": 400, "retention_tokens": 2 * CHUNK, "max_batched": 4 * CHUNK}
    writer, reader = (HybridEngine(node, MODELS[model], **more) for _ in range(2))
    for length in EDGES:
        expected = writer.generate(f"w{length}", prompt(length, length))
        before = pulled(reader)
        assert reader.generate(f"r{length}", prompt(length, length)) == expected
        assert pulled(reader) - before == (length - 1) // BLOCK * BLOCK, f"a prompt of {length} tokens"
    writer.assert_nothing_left()
    reader.assert_nothing_left()


@pytest.mark.parametrize(
    ("model", "retained", "interval"),
    [("gemma", 2 * CHUNK, 0), ("llama4", 2 * CHUNK, 0), ("qwen", CHUNK, CHUNK)],
)
def test_prompts_that_share_any_number_of_tokens(node, model, retained, interval) -> None:
    """The hit ends at the last boundary within what they share at which all kinds were kept, or need nothing: local
    attention at one of its own multiples."""
    more = {"num_blocks": 400, "retention_tokens": retained, "interval": interval, "max_batched": retained}
    writer, reader = (HybridEngine(node, MODELS[model], **more) for _ in range(2))

    def needs_nothing(end: int) -> bool:
        return all(kind.first_token(end) == end for kind in reader.kinds[1:])

    for length in EDGES:
        shared = prompt(length, length)
        writer.generate(f"w{length}", [*shared, *prompt(1, 5 * CHUNK)])
        before = pulled(reader)
        reader.generate(f"r{length}", [*shared, *prompt(2, 2 * CHUNK)])
        hit = max(
            (end for end in range(0, length + 1, CHUNK) if end % retained == 0 or needs_nothing(end)),
        )
        assert pulled(reader) - before == hit, f"{length} tokens in common"
    reader.assert_nothing_left()
