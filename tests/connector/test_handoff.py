"""The hand-off: prefill returns where it pushes, decode waits for it, bounded, and loads all but the last block."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from connector.handoff import read_note, write_note
from connector.keys import Link, links_of
from connector.requests import HandOff
from kvstore.core import Key, MissReason, Namespace
from tests.connector.support import BLOCK, CHUNK, HANDSHAKE, Engine, Node, prompt

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)
STORED = 3 * CHUNK + 2 * BLOCK


@pytest.fixture
def node() -> Node:
    return Node()


def prefill(node: Node, text: list[int] = TEXT) -> tuple[Engine, dict[str, Any]]:
    """An engine that has answered with its saves still under way, and the hand-off."""
    engine = Engine(node)
    engine.worker.hold_saves = True
    engine.submit("p", text, max_tokens=1)
    for _ in range(4):
        engine.step()
    return engine, engine.params["p"]


def finish(engine: Engine) -> None:
    engine.worker.hold_saves = False
    engine.run()


def test_the_response_says_what_is_on_its_way_and_where(node) -> None:
    engine, params = prefill(node)
    note = params["kvstore"]
    assert note["tokens"] == STORED
    assert note["nodes"] == [node.address.node.hex()]
    assert engine.half.session.manifest is not None
    assert note["namespace"] == engine.half.session.manifest.namespace.hex()
    finish(engine)


def test_the_nodes_are_known_before_the_step_after_the_grant(node) -> None:
    """A prompt of one step with one token to generate ends before the next step looks at the grants."""
    engine = Engine(node)
    engine.submit("p", TEXT[: 2 * CHUNK], max_tokens=1)
    engine.step()
    assert engine.params["p"]["kvstore"]["nodes"] == [node.address.node.hex()]
    engine.run()


def test_what_was_refused_is_not_promised_to_decode(node) -> None:
    engine = Engine(node)
    node.refuse = MissReason.NO_ROOM
    engine.generate("p", TEXT, max_tokens=1)
    assert "p" not in engine.params


def test_an_aborted_request_hands_nothing_off(node) -> None:
    engine = Engine(node)
    engine.submit("p", TEXT, max_tokens=50)
    engine.step()
    request = engine.scheduler.requests["p"]
    engine.abort("p")
    assert engine.half.request_finished(request, ()) == (False, None)
    engine.run()
    engine.assert_nothing_left()


def test_decode_waits_for_commits_under_way_and_loads_everything(node) -> None:
    producer, params = prefill(node)
    decode = Engine(node)
    decode.submit("d", TEXT, params=params)
    for _ in range(5):
        assert not decode.step().num_scheduled_tokens
    finish(producer)  # commits
    steps = decode.run()
    assert steps < 10
    assert decode.half.shared.stats.pulled_tokens == STORED
    assert decode.tokens["d"][0] == producer.tokens["p"][0]
    producer.assert_nothing_left()
    decode.assert_nothing_left()


def test_decode_does_not_wait_for_ever(node) -> None:
    """Prefill dies during its push: its commits never come. Mutant: no deadline (hangs)."""
    producer, params = prefill(node)
    decode = Engine(node, handoff_wait_s=2.0)
    decode.submit("d", TEXT, params=params)
    for _ in range(3):
        assert not decode.step().num_scheduled_tokens
    decode.now += 2.1
    node.wake()
    decode.run()
    assert decode.tokens["d"][0] == producer.tokens["p"][0]
    assert decode.half.shared.stats.pulled_tokens == 0
    assert decode.half.shared.stats.misses == {MissReason.NEVER_STORED: 1}
    finish(producer)


def test_a_node_that_forgets_the_wait_is_given_up(node) -> None:
    producer, params = prefill(node)
    decode = Engine(node, handoff_wait_s=2.0, lookup_timeout_s=0.5)
    decode.submit("d", TEXT, params=params)
    decode.step()
    decode.now += 2.6  # nobody wakes the parked acquire
    decode.run()
    assert decode.half.shared.stats.misses == {MissReason.PENDING_TIMEOUT: 1}
    assert decode.control.abandoned == 1
    node.wake()
    finish(producer)


def test_an_abort_while_waiting_leaves_nothing(node) -> None:
    producer, params = prefill(node)
    decode = Engine(node)
    decode.submit("d", TEXT, params=params)
    decode.step()
    decode.abort("d")
    finish(producer)
    decode.run()
    decode.assert_nothing_left()


def test_what_part_of_the_prompt_was_pushed_is_loaded_without_waiting_for_the_rest(node) -> None:
    """Prefill's bound on references left two chunks unsaved: the hand-off says so, and decode does not wait."""
    engine = Engine(node, num_blocks=41, pinned_share=0.2)
    engine.worker.hold_saves = True
    engine.submit("p", TEXT, max_tokens=1)
    for _ in range(6):
        engine.step()
    params = engine.params["p"]
    assert params["kvstore"]["tokens"] == 2 * CHUNK
    finish(engine)
    decode = Engine(node)
    decode.generate("d", TEXT, params=params)
    assert decode.half.shared.stats.pulled_tokens == 2 * CHUNK
    decode.assert_nothing_left()


def test_a_hand_off_of_another_prompt_makes_nobody_wait(node) -> None:
    _, params = prefill(node)
    decode = Engine(node)
    decode.submit("d", prompt(8, len(TEXT)), params=params)
    assert decode.step().num_scheduled_tokens
    assert decode.half.states["d"].handoff is None


def test_a_hand_off_between_different_models_is_said_and_makes_nobody_wait(node, caplog_vllm) -> None:
    _, params = prefill(node)
    decode = Engine(node, weights_version="other")
    decode.submit("d", TEXT, params=params)
    assert decode.step().num_scheduled_tokens
    decode.submit("e", TEXT, params=params)
    assert decode.step().num_scheduled_tokens
    assert caplog_vllm.text.count("its hand-off is ignored, it comes from another namespace: '") == 1
    assert "weights or model configuration differ; later ones silently" in caplog_vllm.text
    decode.run()
    assert decode.half.shared.stats.misses == {MissReason.MANIFEST_DIFFERS: 1}  # e has all from d


@pytest.mark.parametrize(
    ("reader_block", "tokens"), [(BLOCK, STORED), (2 * BLOCK, 3 * CHUNK + 2 * BLOCK), (CHUNK, 3 * CHUNK)]
)
def test_a_hand_off_between_block_sizes_is_of_the_chunks_and_of_a_tail_that_both_cut(
    reader_block: int, tokens: int
) -> None:
    """Mutant: only the last key counts (the whole hand-off is ignored)."""
    namespace = Namespace(bytes(32))
    request = SimpleNamespace(
        all_token_ids=TEXT,
        num_prompt_tokens=len(TEXT),
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
    )
    written = links_of(request, namespace, CHUNK, BLOCK)
    manifest: Any = SimpleNamespace(
        namespace=namespace,
        model={},
        unit_tokens=1,
        tile_format="gpu-kv",
        kv_dtype="bfloat16",
        chunk_tokens=CHUNK,
    )
    note = write_note(manifest, written, ["ab"])
    assert read_note(note, namespace, links_of(request, namespace, CHUNK, reader_block)) == HandOff(
        tokens, ("ab",)
    )


def test_a_hand_off_between_engines_of_different_formats_says_what_differs(node, caplog_vllm) -> None:
    """On CPU the block size is part of the format."""
    _, params = prefill(node)
    decode = Engine(node, shake_hands=False)
    other = replace(HANDSHAKE, unit_tokens=BLOCK // 2)
    decode.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): other})
    decode.generate("d", TEXT, params=params)
    assert (
        "its KV is 'test float32, blocks of 16 tokens, chunks of 64', "
        "here it is 'test float32, blocks of 8 tokens, chunks of 64'"
    ) in caplog_vllm.text
    assert decode.half.shared.stats.misses == {MissReason.MANIFEST_DIFFERS: 1}


@pytest.mark.parametrize(
    "damage",
    [
        None,
        "text",
        {},
        {"tokens": "many"},
        {"nodes": "abc"},
        {"namespace": 7},
        {"tokens": -1, "whole": ""},
        {"surplus": 1},
        {"last": "", "whole": ""},
    ],
)
def test_whatever_a_client_writes_into_it_the_request_is_served(node, damage) -> None:
    producer, params = prefill(node)
    note = {**params["kvstore"], **damage} if isinstance(damage, dict) and damage else damage
    decode = Engine(node)
    expected = producer.tokens["p"][0]
    assert decode.generate("d", TEXT, params={"kvstore": note})[0] == expected
    finish(producer)
    decode.run()
    decode.assert_nothing_left()


def test_names_of_nodes_are_only_names(node) -> None:
    """What is no id of a known node is not an address to connect to."""
    namespace = Namespace(bytes(32))
    link = Link(Key(b"k" * 32), Key(bytes(32)), 0, 0, 64, tail=False)
    note = {"namespace": namespace.hex(), "tokens": 64, "last": link.key.hex(), "nodes": ["evil:80"] * 99}
    handoff = read_note({"kvstore": note}, namespace, [link])
    assert isinstance(handoff, HandOff)
    assert len(handoff.nodes) == 16
