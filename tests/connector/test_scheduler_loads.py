"""Loads in vLLM's real scheduler: what is promised, leased, loaded, and what happens when it fails.

`Engine` checks every token's KV against what it must be, so "the answer is the same" proves that what was
loaded was right; each test also shows that something was loaded, or that it was not.
"""

import pytest

from connector.asks import ACQUIRES_MAX
from connector.leases import LEASE_S
from kvstore.core import MissReason
from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)
STORED = 3 * CHUNK + 2 * BLOCK


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def answer(node) -> list[int]:
    """What TEXT is answered with; afterwards the node holds it."""
    engine = Engine(node)
    answer = engine.generate("first", TEXT)
    engine.assert_nothing_left()
    node.calls.clear()
    return answer


def pulled(engine: Engine) -> int:
    return engine.half.shared.stats.pulled_tokens


def computed(engine: Engine, name: str, text: list[int]) -> int:
    """Prompt tokens that a request has the model compute."""
    engine.submit(name, text, max_tokens=1)
    total = 0
    while engine.scheduler.has_requests():
        total += sum(engine.step().num_scheduled_tokens.values())
    return total


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async scheduling"])
def test_what_one_engine_saved_another_loads(node, answer, ahead) -> None:
    engine = Engine(node, ahead=ahead)
    assert engine.generate("b", TEXT) == answer
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


def test_only_what_is_not_stored_is_computed(node, answer) -> None:
    engine = Engine(node)
    assert computed(engine, "b", TEXT) == len(TEXT) - STORED
    engine.assert_nothing_left()


def test_a_prompt_that_is_stored_whole_costs_one_token(node) -> None:
    text = prompt(2, 2 * CHUNK + BLOCK)
    first = Engine(node).generate("a", text)
    engine = Engine(node)
    assert computed(engine, "b", text) == 1
    assert engine.tokens["b"] == first[:1]
    assert pulled(engine) == len(text)
    engine.assert_nothing_left()


def test_a_longer_prompt_uses_the_chunks_but_not_the_tail(node, answer) -> None:
    engine = Engine(node)
    engine.generate("b", TEXT + prompt(9, CHUNK))
    assert pulled(engine) == 3 * CHUNK
    engine.assert_nothing_left()


def test_a_chunk_that_is_local_in_part_is_read_whole_and_written_in_part(node, answer) -> None:
    engine = Engine(node, save=False)
    engine.generate("short", TEXT[: CHUNK + 2 * BLOCK + 1])  # loads the first chunk, computes two blocks
    before = pulled(engine)
    assert engine.generate("b", TEXT) == answer
    job = engine.worker.seen_loads[-1]
    assert [block is None for block in job.objects[0].blocks] == [True, True, False, False]
    assert pulled(engine) - before == STORED - CHUNK - 2 * BLOCK
    engine.assert_nothing_left()


def test_a_prompt_that_is_local_is_not_asked_for(node) -> None:
    engine = Engine(node)
    engine.generate("a", TEXT)
    node.calls.clear()
    engine.generate("b", TEXT)
    assert "acquire" not in node.calls
    engine.assert_nothing_left()


def test_a_request_that_must_not_read_the_cache_takes_no_lease(node, answer) -> None:
    engine = Engine(node)
    assert engine.generate("b", TEXT, skip_reading_prefix_cache=True) == answer
    assert "acquire" not in node.calls and "lookup" not in node.calls
    assert pulled(engine) == 0
    engine.assert_nothing_left()


def test_a_hit_that_is_too_short_is_not_loaded(node, answer) -> None:
    engine = Engine(node, min_tokens=CHUNK + 1)
    engine.generate("b", TEXT[:CHUNK] + prompt(5, CHUNK))
    assert engine.half.shared.stats.misses[MissReason.TOO_SHORT] == 1
    assert pulled(engine) == 0
    engine.assert_nothing_left()


def test_the_scheduler_may_choose_not_to_load(node, answer) -> None:
    """As under MultiConnector, when another child wins: the lease goes back at once."""
    engine = Engine(node)
    request = engine.submit("b", TEXT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (STORED, True)
    assert len(node.leases) == 1
    engine.connector.update_state_after_alloc(
        request, engine.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0
    )
    assert not node.leases
    engine.run()
    assert engine.tokens["b"] == answer
    engine.assert_nothing_left()


def test_asking_is_idempotent_and_takes_one_lease(node, answer) -> None:
    engine = Engine(node)
    request = engine.submit("b", TEXT)
    asked = [engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(5)]
    assert asked == [(STORED, True)] * 5
    assert node.calls.count("acquire") == 1
    engine.run()
    stats = engine.half.shared.stats
    assert (stats.queried_tokens, stats.promised_tokens) == (len(TEXT), STORED), "counted once"
    assert [line.request for line in engine.control.lines].count("b") == 1
    engine.assert_nothing_left()


def test_a_local_hit_that_grows_between_two_asks_shortens_the_load(node, answer) -> None:
    engine = Engine(node)
    request = engine.submit("b", TEXT)
    ask = engine.connector.get_num_new_matched_tokens
    assert ask(request, 0) == (STORED, True)
    assert ask(request, CHUNK + BLOCK) == (STORED - CHUNK - BLOCK, True)
    assert ask(request, STORED) == (0, False)
    assert not node.leases


def test_a_local_hit_that_shrinks_between_two_asks_is_asked_for_again(node, answer) -> None:
    """Blocks that were counted as local have been evicted: the promise does not reach back to them."""
    engine = Engine(node)
    request = engine.submit("b", TEXT)
    ask = engine.connector.get_num_new_matched_tokens
    assert ask(request, 2 * CHUNK) == (STORED - 2 * CHUNK, True)
    assert ask(request, BLOCK) == (STORED - BLOCK, True)
    assert len(node.leases) == 1
    assert node.calls.count("acquire") == 2


def test_a_local_hit_that_shrinks_while_the_lease_is_being_taken(node, answer) -> None:
    """Mutant: the promise is taken as it comes. It begins behind the hit, and tokens nobody loads pass for loaded."""
    engine = Engine(node)
    engine.control.manual = True
    request = engine.submit("b", TEXT)
    engine.control.answer()
    ask = engine.connector.get_num_new_matched_tokens
    assert ask(request, 2 * CHUNK) == (None, False)
    engine.control.answer()
    assert ask(request, BLOCK) == (None, False)
    assert not node.leases
    engine.control.answer()
    assert ask(request, BLOCK) == (STORED - BLOCK, True)


def test_a_request_that_waits_very_long_is_not_promised_for_ever(node, answer) -> None:
    engine = Engine(node)
    request = engine.submit("b", TEXT)
    answers = []
    for _ in range(ACQUIRES_MAX + 1):
        answers.append(engine.connector.get_num_new_matched_tokens(request, 0))
        engine.now += LEASE_S
    assert answers == [(STORED, True)] * ACQUIRES_MAX + [(0, False)]
    assert not node.leases
    engine.run()
    assert engine.half.shared.stats.misses == {MissReason.LEASE_LIMIT: 1}
    engine.assert_nothing_left()


# --- aborts -------------------------------------------------------------------------------------------


def test_aborted_while_the_lease_is_being_taken(node, answer) -> None:
    engine = Engine(node)
    engine.control.manual = True
    engine.submit("b", TEXT)
    engine.control.answer()  # the lookup
    engine.step()
    assert node.calls.count("acquire") == 1
    engine.abort("b")
    engine.control.answer()
    assert engine.control.abandoned == 1
    engine.control.manual = False
    engine.run()
    engine.assert_nothing_left()


def test_aborted_while_it_waits_for_blocks_with_a_promise(node, answer) -> None:
    engine = Engine(node, num_blocks=20)
    engine.submit("busy", prompt(3, 10 * BLOCK - 4), max_tokens=30)
    engine.step()
    engine.submit("b", TEXT)  # 14 blocks and more do not fit beside that
    engine.step()
    assert len(node.leases) == 1
    engine.abort("b")
    assert not node.leases
    engine.run()
    engine.assert_nothing_left()


def test_aborted_while_loading(node, answer) -> None:
    """Its blocks stay until the load has been reported, then everything goes."""
    engine = Engine(node)
    engine.worker.hold_loads = True
    engine.submit("b", TEXT)
    engine.step()
    engine.abort("b")
    engine.step()
    assert len(node.leases) == 1
    assert engine.scheduler.requests
    engine.worker.hold_loads = False
    engine.run()
    engine.assert_nothing_left()


# --- failures -----------------------------------------------------------------------------------------


def test_a_load_that_fails_whole_is_computed_and_not_promised_again(node, answer) -> None:
    """vLLM asks again at once; a connector that promises again loops for ever. Mutant: no memo."""
    engine = Engine(node)
    engine.worker.fail_load_at = 0
    assert engine.generate("b", TEXT) == answer
    assert len(engine.worker.seen_loads) == 1
    assert node.calls.count("acquire") == 1
    assert engine.half.shared.stats.loads_failed == 1
    assert pulled(engine) == 0
    engine.assert_nothing_left()
    engine.worker.fail_load_at = None
    engine.scheduler.reset_prefix_cache()
    assert engine.generate("c", TEXT) == answer  # the memo was that request's own
    assert pulled(engine) == STORED


def test_a_load_that_fails_in_part_keeps_its_valid_prefix(node, answer) -> None:
    engine = Engine(node)
    engine.worker.fail_load_at = 2
    assert computed(engine, "b", TEXT) == len(TEXT) - 2 * CHUNK
    assert engine.tokens["b"] == answer[:1]
    assert pulled(engine) == 2 * CHUNK
    engine.assert_nothing_left()


def test_what_could_not_be_loaded_is_offered_again(node, answer) -> None:
    """Mutant: the promise has made it known as stored, so for a minute nobody puts it back."""
    engine = Engine(node)
    engine.worker.fail_load_at = 1
    engine.worker.hold_loads = True
    engine.submit("b", TEXT)
    engine.step()
    for key in list(node.objects)[1:]:
        del node.objects[key]
    engine.worker.hold_loads = False
    engine.run()
    assert engine.tokens["b"] == answer
    assert len(node.objects) == 4
    assert engine.half.shared.stats.committed_objects == 3
    engine.assert_nothing_left()


def test_bytes_that_do_not_match_are_computed_and_suspected(node, answer) -> None:
    engine = Engine(node)
    key = list(node.objects)[1]
    damaged = list(node.pages[node.objects[key].generation])
    damaged[3] = b"another request's"
    node.pages[node.objects[key].generation] = tuple(damaged)
    assert engine.generate("b", TEXT) == answer
    assert engine.control.suspects == [key]
    assert pulled(engine) == CHUNK
    engine.assert_nothing_left()


def test_a_report_that_comes_after_the_request_was_released_cannot_make_it_loop(node, answer) -> None:
    """The scheduler hears that a load ended one step before the report says how."""
    engine = Engine(node)
    engine.worker.fail_load_at = 0
    late = []
    update = engine.half.update_connector_output

    def hold_back(output) -> None:
        late.append(output.kv_connector_worker_meta)
        output.kv_connector_worker_meta = None
        update(output)

    engine.half.update_connector_output = hold_back  # type: ignore[method-assign]
    engine.submit("b", TEXT, max_tokens=4)
    engine.step()
    engine.step()
    engine.half.update_connector_output = update  # type: ignore[method-assign]
    engine.half._load_reported(0, late[0].loads[0])
    engine.run()
    assert engine.tokens["b"][:2] == answer
    assert len(engine.worker.seen_loads) == 1
    engine.assert_nothing_left()


def test_beyond_what_may_be_leased_a_prompt_is_computed_and_counted(node, answer) -> None:
    """docs/decisions/0311. vLLM asks once: what is not leased then is not promised."""
    engine = Engine(node)
    acquire = engine.control.acquire

    def limited(keys, *rest):
        some = acquire(keys[:2], *rest)
        some.add_done_callback(lambda f: object.__setattr__(f.result(), "reason", MissReason.LEASE_LIMIT))
        return some

    engine.control.acquire = limited  # type: ignore[method-assign]
    assert engine.generate("b", TEXT) == answer
    stats = engine.half.shared.stats
    assert (stats.pulled_tokens, stats.loads_failed) == (2 * CHUNK, 0)
    assert stats.misses == {MissReason.LEASE_LIMIT: 1}
    engine.assert_nothing_left()


def test_doubled_and_unknown_reports_are_ignored(node, answer) -> None:
    engine = Engine(node)
    engine.generate("b", TEXT)
    report = engine.half.loads
    for job in (0, 0, 77):
        report.reported(job, {})
        engine.half.saves.reported(job, {})
    assert engine.generate("c", TEXT) == answer
    engine.assert_nothing_left()


def test_an_error_of_ours_between_promise_and_job_costs_no_token(node, answer, monkeypatch) -> None:
    """The scheduler waits for that load: a job must go out, and must fail. Mutants: no job (hangs), an empty one."""
    engine = Engine(node)
    monkeypatch.setattr(engine.half.loads, "_targets", lambda *_: 1 / 0)
    assert engine.generate("b", TEXT) == answer
    assert engine.half.breaker.errors == {"update_state_after_alloc: ZeroDivisionError": 1}
    assert [job.deadline_s for job in engine.worker.seen_loads] == [0.0]
    assert engine.half.shared.stats.loads_failed == 1
    engine.half.breaker.errors.clear()
    engine.assert_nothing_left()


# --- time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", ["lookup", "acquire"])
def test_a_store_that_does_not_answer_holds_a_request_back_for_a_moment_only(node, answer, silent) -> None:
    engine = Engine(node, lookup_timeout_s=0.5)
    engine.control.manual = True
    engine.submit("b", TEXT)
    if silent == "acquire":
        engine.control.answer()
    for _ in range(3):
        assert not engine.step().num_scheduled_tokens
    engine.now += 0.6
    assert engine.step().num_scheduled_tokens
    engine.control.manual = False
    engine.control.answer()
    engine.run()
    assert engine.tokens["b"] == answer
    reason = MissReason.INDEX_DOWN if silent == "lookup" else MissReason.NODE_DOWN
    assert engine.half.shared.stats.misses == {reason: 1}
    engine.assert_nothing_left()


def test_without_an_index_the_node_is_asked(node, answer) -> None:
    engine = Engine(node)
    engine.control.index_down = True
    assert engine.generate("b", TEXT) == answer
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


def test_a_node_that_is_down_costs_hits_only(node, answer) -> None:
    engine = Engine(node)
    node.down = True
    assert engine.generate("b", TEXT) == answer
    assert pulled(engine) == 0
    assert engine.half.shared.stats.dropped == {"no node answered the reservation": 4}
    engine.assert_nothing_left()


def test_a_lease_is_renewed_while_its_request_waits(node, answer) -> None:
    engine = Engine(node, num_blocks=20)
    engine.submit("busy", prompt(3, 10 * BLOCK - 4), max_tokens=30)
    engine.step()
    engine.submit("b", TEXT)
    for _ in range(4):
        engine.now += 10
        engine.step()
    assert node.calls.count("acquire") == 1  # b's, which was not taken again; nothing of busy's is stored
    assert "renew" in node.calls
    engine.run()
    assert engine.tokens["b"] == answer
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


def test_a_lease_that_ran_out_is_taken_again(node, answer) -> None:
    engine = Engine(node)
    request = engine.submit("b", TEXT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (STORED, True)
    engine.now += 28
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (STORED, True)
    assert node.calls.count("acquire") == 2
    assert len(node.leases) == 1
    engine.run()
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


def test_steps_longer_than_every_deadline_cost_no_hit(node, answer) -> None:
    """Answers come soon, but the engine looks for them only once a step, and a step on CPU takes many seconds.
    Mutants: one deadline for lookup and acquire; a deadline that is looked at before the answer."""
    engine = Engine(node, lookup_timeout_s=1.0)
    engine.control.manual = True
    engine.submit("b", TEXT)
    for asked in ("lookup", "acquire"):
        assert node.calls[-1] == asked
        assert not engine.step().num_scheduled_tokens
        engine.control.answer(1)
        engine.now += 1.5
        if asked == "lookup":
            assert not engine.step().num_scheduled_tokens
    engine.control.manual = False
    engine.run()
    assert engine.tokens["b"] == answer
    assert pulled(engine) == STORED
    engine.assert_nothing_left()


def test_a_lease_that_is_taken_again_has_a_deadline_of_its_own(node, answer) -> None:
    """Mutant: the deadline of the first acquire, long past, refuses the second one at once."""
    engine = Engine(node)
    engine.control.manual = True
    request = engine.submit("b", TEXT)
    engine.control.answer()
    ask = engine.connector.get_num_new_matched_tokens
    for _ in range(2):
        assert ask(request, 0) == (None, False)
        engine.now += 2  # longer than lookup_timeout_s
        engine.control.answer()
        assert ask(request, 0) == (STORED, True)
        engine.now += 28
    assert node.calls.count("acquire") == 2


def test_no_time_at_all_is_still_one_look(node, answer) -> None:
    engine = Engine(node, lookup_timeout_s=0.0)
    engine.control.manual = True
    request = engine.submit("b", TEXT)
    ask = engine.connector.get_num_new_matched_tokens
    assert ask(request, 0) == (None, False)
    assert ask(request, 0) == (0, False)
    assert engine.half.states["b"].ask.reason is MissReason.INDEX_DOWN


def test_a_renewal_is_taken_before_the_lease_is_judged(node, answer) -> None:
    """The scheduler asks before the step's end looks after leases. Mutants: renewals collected there only; renewed
    when half of the time has gone, which with steps of 14 s is too late."""
    engine = Engine(node)
    engine.control.manual = True
    request = engine.submit("b", TEXT)
    engine.control.answer()
    ask = engine.connector.get_num_new_matched_tokens
    assert ask(request, 0) == (None, False)
    engine.control.answer()
    for _ in range(5):
        assert ask(request, 0) == (STORED, True)
        engine.half.shared.leases.tick()
        engine.control.answer()
        engine.now += 14
    assert node.calls.count("acquire") == 1
    assert node.calls.count("renew") == 4


# --- who asks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "settings", "saves", "loads"),
    [
        ("kv_both", {}, True, True),
        ("kv_producer", {}, True, False),
        ("kv_consumer", {}, False, True),
        ("kv_both", {"save": False}, False, True),
        ("kv_both", {"load": False}, True, False),
    ],
)
def test_roles_and_settings_decide_who_loads_and_who_saves(node, role, settings, saves, loads) -> None:
    engine = Engine(node, role=role, **settings)
    engine.generate("b", prompt(4, 2 * CHUNK))
    assert ("reserve" in node.calls, "lookup" in node.calls) == (saves, loads)
    engine.assert_nothing_left()


def test_requests_are_reported_with_their_outcome(node, answer) -> None:
    engine = Engine(node)
    engine.generate("b", TEXT)
    engine.generate("c", prompt(4, CHUNK))
    engine.step()
    lines = {line.request: line for line in engine.control.lines}
    assert (lines["b"].queried_tokens, lines["b"].promised_tokens, lines["b"].pulled_tokens) == (
        len(TEXT),
        STORED,
        STORED,
    )
    assert (lines["c"].queried_tokens, lines["c"].promised_tokens) == (CHUNK, 0)
    assert lines["c"].reason is MissReason.NEVER_STORED
