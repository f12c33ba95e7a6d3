"""Saves in vLLM's real scheduler: what is offered, what protects it, and what becomes visible."""

from unittest.mock import patch

import pytest

from connector.known import BELIEVED_S
from kvstore.core import MissReason
from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)


@pytest.fixture
def node() -> Node:
    return Node()


def loaded_right(node: Node, text: list[int] = TEXT) -> bool:
    """What is stored of the text is loaded by a fresh engine, and is what the text's KV must be."""
    engine = Engine(node)
    engine.generate("check", text)
    engine.assert_nothing_left()
    return engine.half.shared.stats.pulled_tokens > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
def test_chunks_and_tail_of_a_prompt_are_saved(node, ahead) -> None:
    engine = Engine(node, ahead=ahead)
    engine.generate("a", TEXT)
    assert sorted(stored.size_bytes for stored in node.objects.values()) == [64, 128, 128, 128]
    assert [stored.cold for stored in node.objects.values()] == [False, False, False, True]
    assert engine.half.shared.stats.committed_objects == 4
    engine.assert_nothing_left()
    assert loaded_right(node)


def test_generated_tokens_are_not_saved(node) -> None:
    engine = Engine(node)
    engine.generate("a", prompt(1, CHUNK - 3), max_tokens=2 * CHUNK)
    assert [stored.size_bytes for stored in node.objects.values()] == [3 * BLOCK * 2]
    engine.assert_nothing_left()


def test_chunks_are_pushed_while_a_long_prompt_is_still_being_computed(node) -> None:
    engine = Engine(node, max_batched=CHUNK)
    engine.submit("a", TEXT)
    for _ in range(3):
        engine.step()
    assert len(node.objects) >= 1
    assert "a" in engine.scheduler.requests
    engine.run()
    engine.assert_nothing_left()
    assert loaded_right(node)


def test_one_step_makes_one_reservation(node) -> None:
    engine = Engine(node, max_batched=2048)
    for name in "abc":
        engine.submit(name, prompt(ord(name), 2 * CHUNK + BLOCK))
    engine.step()
    assert node.calls.count("reserve") == 1
    engine.run()
    assert len(node.objects) == 9
    engine.assert_nothing_left()


def test_two_requests_with_one_prefix_save_it_once(node) -> None:
    engine = Engine(node, max_batched=2048)
    engine.submit("a", TEXT)
    engine.submit("b", TEXT)
    engine.run()
    assert sum(len(job.objects) for job in engine.worker.seen_saves) == 4
    engine.assert_nothing_left()


def test_what_is_stored_is_not_offered_again_for_a_while(node) -> None:
    engine = Engine(node, prefix_caching=False, load=False)
    engine.generate("a", TEXT)
    engine.generate("b", TEXT)
    assert node.calls.count("reserve") == 1
    node.objects.clear()  # the node has evicted everything, and does not tell
    engine.now += BELIEVED_S
    engine.generate("c", TEXT)
    assert len(node.objects) == 4
    engine.assert_nothing_left()


def test_what_a_lookup_misses_is_offered_again_at_once(node) -> None:
    engine = Engine(node)
    engine.generate("a", TEXT)
    node.objects.clear()
    engine.generate("b", TEXT)
    assert len(node.objects) == 4
    assert loaded_right(node)


def test_what_exists_already_is_neither_written_nor_kept(node) -> None:
    Engine(node).generate("a", TEXT)
    engine = Engine(node, load=False)
    engine.generate("b", TEXT)
    assert not engine.worker.seen_saves
    engine.assert_nothing_left()


def test_what_was_refused_is_offered_by_the_next_request(node) -> None:
    engine = Engine(node)
    node.refuse = MissReason.NO_ROOM
    engine.generate("a", TEXT)
    assert not node.objects
    assert engine.half.shared.stats.dropped == {"refused: no_room": 4}
    engine.assert_nothing_left()
    node.refuse = None
    engine.generate("b", TEXT)
    assert len(node.objects) == 4
    engine.assert_nothing_left()


def test_what_another_engine_is_saving_is_left_to_it(node) -> None:
    one, other = Engine(node), Engine(node)
    one.worker.hold_saves = True
    one.submit("a", TEXT)
    for _ in range(4):
        one.step()
    other.generate("b", TEXT)
    assert other.half.shared.stats.dropped == {"another engine is saving it": 4}
    assert not node.objects
    assert other.half.saves.pinned_blocks == 0
    one.worker.hold_saves = False
    one.run()
    assert len(node.objects) == 4
    one.assert_nothing_left()


# --- what protects the blocks -------------------------------------------------------------------------


def test_an_idle_engine_goes_on_until_its_saves_are_committed(node) -> None:
    engine = Engine(node)
    engine.worker.hold_saves = True
    engine.submit("a", TEXT, max_tokens=1)
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.requests
    assert engine.scheduler.has_requests(), "the engine would go to sleep with a save under way"
    engine.worker.hold_saves = False
    engine.run()
    assert len(node.objects) == 4
    engine.assert_nothing_left()


def test_blocks_of_a_finished_request_are_not_reused_while_they_are_saved(node) -> None:
    """Mutant: no references. Then the second request overwrites the blocks of the first, and what is saved
    under the first one's keys is the second one's KV."""
    engine = Engine(node, num_blocks=40, prefix_caching=False)
    engine.worker.hold_saves = True
    engine.submit("a", TEXT, max_tokens=1)
    for _ in range(3):
        engine.step()
    held = engine.half.saves.pinned_blocks
    assert held == len(TEXT) // BLOCK
    for number in range(4):  # more than the pool holds, if it were not for the references
        engine.submit(f"b{number}", prompt(50 + number, 10 * BLOCK), max_tokens=1)
        for _ in range(3):
            engine.step()
    assert all(request.is_finished() for request in engine.scheduler.requests.values())
    engine.worker.hold_saves = False
    engine.run()
    engine.assert_nothing_left()
    assert loaded_right(node)


def test_a_preempted_request_does_not_take_its_blocks_out_of_a_save(node) -> None:
    """Mutant: no references. The classic way to poison a store (vLLM issue 52360). Without them the preempted
    request would come back during the save and write its prompt into the same blocks, in another order."""
    engine = Engine(node, num_blocks=30, max_batched=2048, prefix_caching=False, pinned_share=1.0)
    engine.worker.hold_saves = True
    for number in range(2):
        engine.submit(f"a{number}", prompt(number, 11 * BLOCK), max_tokens=8 * BLOCK)
    preempted = 0
    for _ in range(200):
        engine.step()
        preempted = max([r.num_preemptions for r in engine.scheduler.requests.values()] + [preempted])
    engine.worker.hold_saves = False
    assert preempted, "nothing was preempted: the test shows nothing"
    engine.run(600)
    engine.assert_nothing_left()
    for number in range(2):
        assert loaded_right(node, prompt(number, 11 * BLOCK))


def test_saves_hold_no_more_than_their_share_of_the_blocks(node) -> None:
    engine = Engine(node, num_blocks=41, pinned_share=0.2)  # 8 blocks: two chunks
    engine.worker.hold_saves = True
    engine.submit("a", TEXT, max_tokens=1)
    for _ in range(6):
        engine.step()
    assert engine.half.saves.pinned_blocks <= 0.2 * 41
    engine.worker.hold_saves = False
    engine.run()
    assert len(node.objects) == 2
    assert engine.half.shared.stats.dropped == {
        "saves under way hold as many KV blocks as pinned_share allows": 2
    }
    engine.assert_nothing_left()


def test_what_waited_for_its_share_is_saved_while_its_request_runs(node) -> None:
    engine = Engine(node, num_blocks=41, pinned_share=0.2)
    engine.generate("a", TEXT, max_tokens=12)
    assert len(node.objects) == 4
    engine.assert_nothing_left()


# --- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [True, False])
def test_a_save_that_fails_is_aborted_and_nothing_becomes_visible(node, quiet) -> None:
    engine = Engine(node)
    engine.worker.fail_saves, engine.worker.quiet = True, quiet
    engine.generate("a", TEXT)
    assert not node.objects
    assert f"abort quiet={quiet}" in node.calls
    assert engine.half.shared.stats.dropped == {"its bytes could not be written": 4}
    engine.assert_nothing_left()


def test_a_table_with_a_run_missing_is_never_committed(node, monkeypatch) -> None:
    engine = Engine(node)
    whole = engine.worker._save

    def without_the_last_run(job):
        report = whole(job)
        for sums in report.checksums:
            assert sums is not None
            del sums[1]
        return report

    monkeypatch.setattr(engine.worker, "_save", without_the_last_run)
    engine.generate("a", TEXT)
    assert not node.objects and "commit" not in node.calls
    engine.assert_nothing_left()


def test_a_reservation_that_is_answered_too_late_is_given_back(node) -> None:
    engine = Engine(node, save_timeout_s=30.0)
    engine.control.manual = True
    engine.submit("a", TEXT, max_tokens=30, skip_reading_prefix_cache=True)
    engine.step()
    engine.control.answer()
    engine.now += 60
    engine.control.manual = False
    engine.run()
    assert "abort quiet=True" in node.calls
    assert not engine.worker.seen_saves
    engine.assert_nothing_left()


def test_a_commit_that_nobody_answers_is_counted_and_offered_again(node) -> None:
    engine = Engine(node)
    engine.worker.hold_saves = True
    engine.submit("a", TEXT)
    for _ in range(4):
        engine.step()
    node.down = True
    engine.worker.hold_saves = False
    engine.run()
    assert engine.half.shared.stats.dropped == {"its commit was not accepted or not answered": 4}
    node.down = False
    node.reserved.clear()  # they expire
    engine.generate("b", TEXT)
    assert len(node.objects) == 4
    engine.assert_nothing_left()


def test_new_weights_share_nothing_with_old_ones(node) -> None:
    """`reset_prefix_cache(reset_connector=True)`, as after a weight update: a fresh namespace, and saves of the
    old weights that are still under way do not become visible."""
    engine = Engine(node)
    old = engine.half.session.namespace
    engine.worker.hold_saves = True
    engine.submit("a", TEXT, max_tokens=1)
    for _ in range(3):
        engine.step()
    assert engine.half.saves.pending
    assert engine.scheduler.reset_connector_cache()
    assert engine.half.session.namespace not in (old, None)
    engine.worker.hold_saves = False
    engine.run()
    assert not node.objects
    engine.assert_nothing_left()
    engine.scheduler.reset_prefix_cache()
    Engine(node).generate("b", TEXT)  # with the old weights
    before = engine.half.shared.stats.pulled_tokens
    engine.generate("c", TEXT)
    assert engine.half.shared.stats.pulled_tokens == before == 0
    assert len(node.objects) == 8
    engine.assert_nothing_left()


def test_a_reservation_of_old_weights_is_given_back(node) -> None:
    engine = Engine(node)
    engine.control.manual = True
    engine.submit("a", TEXT, max_tokens=30, skip_reading_prefix_cache=True)
    engine.step()
    engine.half.reset_cache()
    engine.control.answer()
    engine.control.manual = False
    engine.run()
    assert "abort quiet=True" in node.calls
    engine.assert_nothing_left()


def computed(engine: Engine, name: str) -> int:
    """Prompt tokens of TEXT that the model computes."""
    engine.submit(name, TEXT, max_tokens=1)
    total = 0
    while engine.scheduler.has_requests():
        total += sum(engine.step().num_scheduled_tokens.values())
    return total


def test_references_of_saves_do_not_keep_old_weights_alive_through_a_reset(node) -> None:
    """vLLM cannot empty its pool while saves hold blocks, and asks the connector afterwards. Mutant: references stay.
    Then the next request hits blocks of the old weights and offers them in the new namespace."""
    engine = Engine(node)
    engine.worker.hold_saves = True
    engine.submit("a", TEXT, max_tokens=1)
    for _ in range(4):
        engine.step()
    assert engine.half.saves.pinned_blocks and not engine.scheduler.requests
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.half.saves.pinned_blocks == 0
    engine.worker.hold_saves = False
    assert computed(engine, "b") == len(TEXT), "it has hit blocks of the old weights"
    engine.run()
    assert len(node.objects) == 4
    assert engine.half.shared.stats.dropped == {"the engine's cache was reset": 4}
    engine.assert_nothing_left()


def test_a_grant_that_comes_after_the_reset_goes_back(node) -> None:
    engine = Engine(node)
    engine.control.manual = True
    engine.submit("a", TEXT, max_tokens=1, skip_reading_prefix_cache=True)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.half.saves.pinned_blocks == 0 and engine.half.saves.pending
    engine.control.manual = False
    engine.control.answer()
    engine.run()
    assert node.calls.count("abort quiet=True") == 1 and not node.reserved
    engine.assert_nothing_left()


def test_a_reset_amid_a_prompt_saves_nothing_until_a_reset_finds_the_pool_empty(node) -> None:
    """Mutants: the running request's links are computed anew in the new namespace and offered from the first on;
    later requests, which hit its old blocks, are offered."""
    engine = Engine(node, max_batched=CHUNK)
    engine.submit("a", TEXT, skip_reading_prefix_cache=True)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    node.objects.clear()
    node.calls.clear()
    engine.generate("b", TEXT)
    assert engine.half.shared.stats.misses == {MissReason.MANIFEST_DIFFERS: 1}
    assert node.calls == [] and not node.objects
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert computed(engine, "c") == len(TEXT)
    engine.run()
    assert len(node.objects) == 4
    engine.assert_nothing_left()


def test_what_a_reset_preempts_is_not_saved_and_what_comes_later_is(node) -> None:
    engine = Engine(node, max_batched=CHUNK)
    engine.submit("a", TEXT, max_tokens=4)
    engine.step()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):  # vLLM asks nobody before
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.half.saves.pinned_blocks
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)  # what docs/CONNECTOR.md says to do
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    node.objects.clear()
    engine.run()
    assert not node.objects
    engine.generate("b", TEXT)
    assert len(node.objects) == 4
    engine.assert_nothing_left()


def test_a_load_under_way_at_a_reset_is_of_the_old_weights_and_is_not_saved(node) -> None:
    Engine(node).generate("first", TEXT)
    engine = Engine(node)
    engine.worker.hold_loads = True
    engine.submit("a", TEXT)
    engine.step()
    assert engine.half.loads.under_way == 1
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.worker.hold_loads = False
    node.calls.clear()
    engine.run()
    assert "reserve" not in node.calls
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.assert_nothing_left()


@pytest.mark.parametrize("late", [False, True], ids=["at the workers", "being offered"])
def test_what_rests_on_blocks_that_turn_out_invalid_is_not_committed(node, late) -> None:
    """Another connector beside ours brings blocks within a step and then says that they are none. vLLM computes the
    request again from there on. Mutants: what rests on them is committed; it is not offered again."""
    answer = Engine(Node()).generate("a", TEXT)
    engine = Engine(node, max_batched=CHUNK)
    engine.submit("a", TEXT, skip_reading_prefix_cache=True)
    engine.control.manual = late
    engine.step()
    block = engine.scheduler.kv_cache_manager.get_block_ids("a")[0][2]
    step = engine.worker.step

    def invalid(jobs):
        engine.worker.memory[block][3] = b"what the other store did not bring"
        output = step(jobs)
        output.invalid_block_ids = {block}
        return output

    with patch.object(engine.worker, "step", invalid):
        engine.step()
    assert "commit" not in node.calls and engine.half.states["a"].offered == 0
    engine.control.manual = False
    engine.control.answer()
    engine.run()
    assert engine.tokens["a"] == answer
    assert len(node.objects) == 4
    assert engine.half.shared.stats.dropped["its KV turned out to be invalid"]
    engine.assert_nothing_left()
    assert loaded_right(node)
