"""New weights in a running engine: after `reset_prefix_cache(reset_connector=True)` nobody is given the wrong KV.

vLLM does not reset while blocks are in use, by loads and saves too; its caller asks again until it does, and so do
these tests. The weights change in the moment in which it succeeds.

Mutants that were tried and are caught: nothing reset; the epoch not changed (then requests and saves under way go on
under their old keys); the keys and promises of waiting requests kept; a name for new weights that is not random.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.connector.support import Node
from tests.identity.support import STORED_TOKENS, TEXT, LoadedEngine, model_folder


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    return model_folder(tmp_path_factory.mktemp("one"), model_path)


def new_weights(engine: LoadedEngine, *, preempt: bool = False) -> int:
    """Gives the engine new weights, as soon as vLLM lets it forget; how often it refused."""
    for refused in range(50):
        with contextlib.suppress(RuntimeError):  # when it preempts, and loads or saves hold blocks
            if engine.scheduler.reset_prefix_cache(preempt, reset_connector=True):
                engine.loaded = b"new weights"
                return refused
        engine.worker.hold_loads = engine.worker.hold_saves = False
        engine.control.answer()
        engine.step()
    raise AssertionError("vLLM never resets")


def idle(engine: LoadedEngine) -> None:
    """Nothing is going on."""


def promised(engine: LoadedEngine) -> None:
    """A request holds a promise, and waits for blocks."""
    engine.submit("early", TEXT)
    engine.scheduler.connector.get_num_new_matched_tokens(engine.scheduler.requests["early"], 0)
    engine.control.answer()
    assert engine.scheduler.connector.get_num_new_matched_tokens(engine.scheduler.requests["early"], 0)[0]
    assert engine.node.leases


def asked(engine: LoadedEngine) -> None:
    """A request has asked, and is not answered before the reset."""
    engine.control.manual = True
    engine.submit("early", TEXT)
    engine.step()


def loading(engine: LoadedEngine) -> None:
    """A load is under way."""
    engine.worker.hold_loads = True
    engine.submit("early", TEXT)
    engine.step()
    assert engine.half.loads.under_way


def reserving(engine: LoadedEngine) -> None:
    """A prompt was computed, and no node has answered its reservation."""
    engine.control.manual = True
    engine.submit("fresh", [7, *TEXT], max_tokens=40)
    engine.step()
    engine.control.answer()
    engine.step()
    engine.step()
    assert engine.half.saves.pending


def saving(engine: LoadedEngine) -> None:
    """A prompt was computed, and is being pushed."""
    engine.worker.hold_saves = True
    engine.submit("fresh", [7, *TEXT], max_tokens=40)
    for _ in range(4):
        engine.step()
    assert engine.worker.waiting_saves


def committing(engine: LoadedEngine) -> None:
    """A prompt was pushed, and no node has answered its commit."""
    saving(engine)
    engine.control.manual, engine.worker.hold_saves = True, False
    engine.step()
    assert engine.half.saves.pending
    assert not engine.half.saves.pinned_blocks


MOMENTS = [idle, promised, asked, loading, reserving, saving, committing]


@pytest.mark.parametrize("moment", MOMENTS, ids=[moment.__name__ for moment in MOMENTS])
@pytest.mark.parametrize("preempt", [False, True], ids=["patient", "preempting"])
def test_after_a_reset_nobody_is_given_the_wrong_kv(
    node: Node, folder: Path, moment: Callable[[LoadedEngine], None], preempt: bool
) -> None:
    """Every token that is computed checks the KV that it attends to: see tests/connector/support.py."""
    changed, other = LoadedEngine(node, folder), LoadedEngine(node, folder)
    old = other.generate("a", TEXT)
    moment(changed)
    new_weights(changed, preempt=preempt)
    changed.control.manual = changed.worker.hold_loads = changed.worker.hold_saves = False
    changed.control.answer()
    changed.run()
    changed.half.shared.stats.pulled_tokens = 0

    new = changed.generate("b", TEXT)
    assert new != old
    assert changed.pulled == 0
    changed.forget()
    assert changed.generate("c", TEXT) == new
    assert changed.pulled == STORED_TOKENS, "it finds again what it has stored since"
    changed.assert_nothing_left()

    other.forget()
    assert other.generate("d", TEXT) == old
    assert other.pulled == STORED_TOKENS, "what others share is left to them"
    other.generate("e", [7, *TEXT])  # what the engine was pushing when its weights changed
    other.assert_nothing_left()


def test_a_hand_off_from_before_a_reset_is_of_no_use_after_it(node: Node, folder: Path) -> None:
    prefill, decode = LoadedEngine(node, folder), LoadedEngine(node, folder)
    prefill.generate("a", TEXT, max_tokens=1)
    new_weights(decode)
    new = decode.generate("b", TEXT, params=prefill.params["a"])
    assert decode.pulled == 0
    new_weights(prefill)
    prefill.generate("c", TEXT, max_tokens=1)
    decode.forget()
    assert decode.generate("d", TEXT, params=prefill.params["c"]) == new, "the same weights, told by nobody"
    assert decode.pulled == STORED_TOKENS, "its own"


def test_two_engines_with_new_weights_share_nothing(node: Node, folder: Path) -> None:
    """Nothing says that they are the same new weights."""
    one, two = LoadedEngine(node, folder), LoadedEngine(node, folder)
    for engine in (one, two):
        new_weights(engine)
    two.loaded = b"other new weights"
    assert one.generate("a", TEXT) != two.generate("b", TEXT)
    assert (one.pulled, two.pulled) == (0, 0)
    for engine in (one, two):
        engine.forget()
        engine.generate("c", TEXT)
        assert engine.pulled == STORED_TOKENS, "its own"


def test_a_reset_before_the_weights_are_known_counts(node: Node, folder: Path) -> None:
    old = LoadedEngine(node, folder).generate("a", TEXT)
    early = LoadedEngine(node, folder, early=True)
    new_weights(early)
    early.shake_hands()
    new = early.generate("b", TEXT)
    assert new != old
    assert early.pulled == 0
    early.forget()
    assert early.generate("c", TEXT) == new
    assert early.pulled == STORED_TOKENS, "its own"
