"""Nodes that answer but move no bytes: what their failures cost, and how they come back."""

from dataclasses import replace
from itertools import pairwise

import pytest

from connector.paths import FAILURES_MAX, TRIAL_S, TRIAL_S_MAX, Paths
from kvstore.core import MissReason
from tests.connector.support import CHUNK, Engine, Node, prompt

TEXT = prompt(1, 3 * CHUNK + 5)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def answer(node) -> list[int]:
    return Engine(node).generate("first", TEXT)


def broken(node: Node, reason: MissReason = MissReason.TOO_SLOW, **settings) -> Engine:
    """An engine whose first loads have failed."""
    engine = Engine(node, prefix_caching=False, save=False, **settings)
    engine.worker.reason = reason
    engine.worker.fail_load_at = 0
    for number in range(FAILURES_MAX):
        engine.generate(f"fails{number}", TEXT)
    assert len(engine.worker.seen_loads) == FAILURES_MAX
    return engine


@pytest.mark.parametrize("reason", [MissReason.TOO_SLOW, MissReason.NODE_DOWN])
def test_a_node_that_moves_no_bytes_is_left_alone(node, answer, reason) -> None:
    """Mutant: no memory. Every request that hits waits for its time-out."""
    engine = broken(node, reason)
    request = engine.submit("b", TEXT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not node.leases
    engine.run()
    assert engine.tokens["b"] == answer
    assert len(engine.worker.seen_loads) == FAILURES_MAX
    misses = engine.half.shared.stats.misses
    assert (misses[reason], misses[MissReason.BREAKER_OPEN]) == (FAILURES_MAX, 1)
    engine.assert_nothing_left()


def test_bad_bytes_are_no_broken_path(node, answer) -> None:
    engine = broken(node, MissReason.BAD_COPY)
    engine.worker.fail_load_at = None
    assert engine.generate("b", TEXT) == answer
    assert engine.half.shared.stats.pulled_tokens == 3 * CHUNK
    engine.assert_nothing_left()


def test_a_trial_that_succeeds_brings_the_node_back(node, answer) -> None:
    engine = broken(node)
    engine.worker.fail_load_at = None
    engine.now += 2 * TRIAL_S
    for name in "bc":
        assert engine.generate(name, TEXT) == answer
    assert engine.half.shared.stats.pulled_tokens == 6 * CHUNK
    engine.assert_nothing_left()


def test_nodes_in_trouble_are_tried_ever_more_rarely(node) -> None:
    """Also where a trial comes to nothing. Mutant: one that is never reported blocks all further ones."""
    now = 0.0
    paths = Paths(lambda: now)
    for _ in range(FAILURES_MAX):
        assert paths.allows(node.address)
        paths.failed(node.address, MissReason.NODE_DOWN)
    tried = []
    while now < 20 * TRIAL_S_MAX:
        now += TRIAL_S / 10
        if paths.allows(node.address):
            tried.append(now)
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert 0.7 * TRIAL_S < tried[0] < 1.4 * TRIAL_S
    assert 1.4 * TRIAL_S < pauses[0] < 2.6 * TRIAL_S
    assert all(0.7 * TRIAL_S_MAX < pause < 1.3 * TRIAL_S_MAX for pause in pauses[6:])


def test_failures_count_only_in_a_row_and_per_node() -> None:
    paths = Paths(lambda: 0.0)
    one, other = Node(1).address, Node(2).address
    for _ in range(FAILURES_MAX - 1):
        paths.failed(one, MissReason.TOO_SLOW)
    paths.moved(one)
    for _ in range(FAILURES_MAX - 1):
        paths.failed(one, MissReason.TOO_SLOW)
    assert paths.allows(one)
    paths.failed(one, MissReason.TOO_SLOW)
    assert not paths.allows(one) and paths.allows(other)


def test_only_what_lies_at_other_nodes_is_loaded(node, answer, monkeypatch) -> None:
    """The second chunk of three is at a node that moves nothing: the first is loaded, the rest computed."""
    engine = Engine(node, prefix_caching=False, save=False)
    far = Node(2).address
    whole, key = engine.control._promised, list(node.objects)[1]
    monkeypatch.setattr(
        engine.control, "_promised", lambda k: replace(whole(k), node=far) if k == key else whole(k)
    )
    for _ in range(FAILURES_MAX):
        engine.half.shared.paths.failed(far, MissReason.TOO_SLOW)
    assert engine.generate("b", TEXT) == answer
    assert engine.half.shared.stats.pulled_tokens == CHUNK
    assert engine.half.shared.stats.misses == {MissReason.BREAKER_OPEN: 1}
    engine.assert_nothing_left()


def test_nothing_is_saved_to_a_node_that_takes_no_bytes(node) -> None:
    engine = Engine(node, load=False)
    engine.worker.fail_saves, engine.worker.reason = True, MissReason.TOO_SLOW
    for number in range(FAILURES_MAX + 1):
        engine.generate(f"a{number}", prompt(number, CHUNK))
    assert len(engine.worker.seen_saves) == FAILURES_MAX
    assert engine.half.shared.stats.dropped["refused: breaker_open"] == 1
    assert not node.reserved
    engine.worker.fail_saves = False
    engine.now += 2 * TRIAL_S
    engine.generate("b", prompt(8, CHUNK))
    engine.generate("c", prompt(9, CHUNK))
    assert len(node.objects) == 2
    engine.assert_nothing_left()
