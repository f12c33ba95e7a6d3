"""The connector in vLLM's factory, its start, its end, and what it does when it cannot be of use."""

import inspect
import random
import sys
from dataclasses import replace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

import connector
from connector.compat import unsupported_engine
from connector.config import read_config
from connector.connector import KVStoreConnector
from connector.guard import ERRORS_MAX, WINDOW_S, Breaker
from connector.metadata import Handshake, Jobs, Layer
from connector.scheduler import SchedulerHalf
from kvstore.core import BadConfiguration, MissReason
from tests.connector.support import (
    BLOCK,
    CHUNK,
    HANDSHAKE,
    Engine,
    FakeControl,
    Node,
    kv_cache_config,
    prompt,
)

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def answer(node) -> list[int]:
    return Engine(node).generate("first", TEXT)


# --- how vLLM finds it --------------------------------------------------------------------------------


def test_vllm_finds_it_by_module_path_and_by_name() -> None:
    by_path = KVTransferConfig(
        kv_connector="KVStoreConnector", kv_connector_module_path="connector", kv_role="kv_both"
    )
    assert KVConnectorFactory.get_connector_class(by_path) is KVStoreConnector
    connector.register()
    connector.register()  # vLLM may load its plugins twice
    by_name = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(by_name) is KVStoreConnector
    assert KVConnectorFactory.get_connector_class_by_name("KVStoreConnector") is KVStoreConnector


def test_it_is_registered_without_looking_at_the_rest_of_vllm(monkeypatch, caplog_vllm) -> None:
    """Every process of vLLM calls this. Mutant: names that another version lacks are imported here."""
    for module in ("connector.compat", "connector.connector"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(KVConnectorFactory._registry, "KVStoreConnector", raising=False)
    connector.register()
    assert "KVStoreConnector" in KVConnectorFactory._registry
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    connector.register()
    lines = [record.getMessage() for record in caplog_vllm.records]
    assert len([line for line in lines if "KVStoreConnector cannot be registered: " in line]) == 1


def test_it_is_what_vllm_takes() -> None:
    assert "kv_cache_config" in inspect.signature(KVStoreConnector.__init__).parameters
    assert supports_hma(KVStoreConnector)
    assert not KVStoreConnector.requires_piecewise_for_cudagraph({})
    assert not inspect.isabstract(KVStoreConnector)


def test_the_layout_is_asked_for_where_there_are_heads(node) -> None:
    engine = Engine(node)
    assert KVStoreConnector.get_required_kvcache_layout(engine.config) == "LBHNC"
    engine.config.model_config = None
    assert KVStoreConnector.get_required_kvcache_layout(engine.config) == "LBHNC"


def test_failed_loads_are_recomputed_whatever_was_configured(node) -> None:
    engine = Engine(node)
    assert engine.scheduler.recompute_kv_load_failures
    assert not engine.scheduler.requires_kv_delivery


def test_an_unknown_setting_is_refused_with_the_known_ones(node) -> None:
    with pytest.raises(BadConfiguration, match="does not know nodes; it knows node, redis"):
        Engine(node, nodes=["127.0.0.1:1"])


def test_a_chunk_must_be_whole_blocks(node) -> None:
    with pytest.raises(
        BadConfiguration, match="chunk_tokens 40 is not a multiple of the engine's block size 16"
    ):
        Engine(node, chunk_tokens=40)


# --- engines that it cannot serve ---------------------------------------------------------------------


def full() -> FullAttentionSpec:
    spec = kv_cache_config(10).kv_cache_groups[0].kv_cache_spec
    assert isinstance(spec, FullAttentionSpec)
    return spec


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v, k: setattr(v.parallel_config, "decode_context_parallel_size", 2), "decode context"),
        (lambda v, k: setattr(v.parallel_config, "prefill_context_parallel_size", 2), "prefill context"),
        (
            lambda v, k: k.kv_cache_groups.__setitem__(
                0,
                KVCacheGroupSpec(
                    ["layer"],
                    SlidingWindowSpec(
                        block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=full().dtype, sliding_window=64
                    ),
                ),
            ),
            "a model without attention over all tokens",
        ),
    ],
)
def test_engines_that_are_not_understood(node, change, reason) -> None:
    engine = Engine(node)
    assert unsupported_engine(engine.config, engine.kv_cache_config) is None
    change(engine.config, engine.kv_cache_config)
    assert reason in str(unsupported_engine(engine.config, engine.kv_cache_config))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [((), "a model without attention"), ((40, 16), "a model whose KV cache groups differ in block size")],
)
def test_a_model_that_is_not_understood_does_not_stop_the_engine(node, sizes, reason, caplog_vllm) -> None:
    """Mutant: chunk_tokens is compared with the block size of its first group, which is none of ours or not there."""
    groups = [KVCacheGroupSpec([f"layer{size}"], replace(full(), block_size=size)) for size in sizes]
    config = replace(kv_cache_config(10), kv_cache_groups=groups)
    control = FakeControl(node)
    half = SchedulerHalf(Engine(node).config, config, read_config({}), control, Breaker(lambda: 0.0))
    assert half.session.unsupported is not None
    assert caplog_vllm.text.count(reason) == 1
    assert node.calls == []


def test_a_reset_says_that_nobody_shares_the_new_namespace(node, caplog_vllm) -> None:
    caplog_vllm.set_level("INFO", "vllm")
    engine = Engine(node)
    assert caplog_vllm.text.count("KV is shared with engines of namespace") == 1
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert caplog_vllm.text.count("KV is shared with engines of namespace") == 1
    assert "after the reset KV is stored in namespace" in caplog_vllm.text


@pytest.mark.parametrize("why", ["worker", "engine", "ranks"])
def test_what_is_not_understood_is_neither_saved_nor_loaded_and_said_once(
    node, answer, why, monkeypatch, caplog_vllm
) -> None:
    if why == "engine":
        monkeypatch.setattr(
            "connector.scheduler.unsupported_engine", lambda *_: "this shape is not supported"
        )
    engine = Engine(node, shake_hands=False)
    hands = {
        "worker": {(0, 0): Handshake(unsupported="this shape is not supported")},
        "engine": {(0, 0): HANDSHAKE},
        "ranks": {},
    }[why]
    engine.connector.set_xfer_handshake_metadata_pp_aware(hands)
    node.calls.clear()
    for name in "bc":
        assert engine.generate(name, TEXT) == answer
    assert node.calls == []
    assert engine.half.shared.stats.misses == {MissReason.LAYOUT_UNSUPPORTED: 2}
    assert caplog_vllm.text.count("this engine neither saves nor loads KV") == 1
    engine.assert_nothing_left()


def test_until_the_worker_has_spoken_requests_are_held_back_for_a_moment(node, answer) -> None:
    engine = Engine(node, shake_hands=False, lookup_timeout_s=0.5)
    engine.submit("b", TEXT)
    assert not engine.step().num_scheduled_tokens
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): HANDSHAKE})
    engine.run()
    assert engine.half.shared.stats.pulled_tokens == 3 * CHUNK + 2 * BLOCK
    silent = Engine(node, shake_hands=False, lookup_timeout_s=0.5)
    silent.submit("b", TEXT)
    silent.step()
    silent.now += 1
    silent.run()
    assert silent.tokens["b"] == answer
    silent.assert_nothing_left()


def test_weights_that_cannot_be_identified_are_said_and_not_shared(node, monkeypatch, caplog_vllm) -> None:
    def unknown(*_):
        raise BadConfiguration("the weights are nowhere to be seen")

    monkeypatch.setattr("connector.session.weights_identity", unknown)
    engine = Engine(node)
    engine.generate("a", TEXT)
    assert node.calls == []
    assert "the weights are nowhere to be seen: this engine neither saves nor loads KV" in caplog_vllm.text


def test_a_chunk_that_does_not_fit_into_staging_is_said(node, caplog_vllm) -> None:
    engine = Engine(node, shake_hands=False)
    large = replace(HANDSHAKE, layers=tuple(Layer(f"layers.{n}", 8, 1 << 20) for n in range(1024)))
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): large})
    engine.generate("a", TEXT)
    assert node.calls == []
    assert "a worker's part of a chunk takes 34359738368 bytes, more than staging_bytes" in caplog_vllm.text


# --- errors of our own --------------------------------------------------------------------------------


HOOKS = [
    ("on_new_request", "asks.look_up"),
    ("get_num_new_matched_tokens", "asks.match"),
    ("request_finished", "saves.covered"),
    ("build_connector_meta", "saves.plan"),
    ("build_connector_meta", "saves.take_ready"),
    ("build_connector_meta", "saves.tick"),
    ("has_pending_push_work", "saves.__class__.pending"),
]


@pytest.mark.parametrize(("hook", "place"), HOOKS, ids=[place for _, place in HOOKS])
def test_no_error_of_ours_ends_the_engine_or_changes_a_token(node, answer, hook, place, monkeypatch) -> None:
    engine = Engine(node)

    def broken(*_):
        raise RuntimeError("a bug")

    target, name = engine.half, place
    while "." in name:
        first, name = name.split(".", 1)
        target = getattr(target, first)
    monkeypatch.setattr(target, name, property(broken) if name == "pending" else broken)
    engine.submit("b", TEXT)
    for _ in range(40):
        engine.scheduler.has_requests()
        engine.step()
    assert engine.tokens["b"] == answer
    assert engine.half.breaker.errors.total() >= 1


def test_the_breaker_opens_after_several_errors_in_a_short_time() -> None:
    now = 0.0
    breaker = Breaker(lambda: now)
    for _ in range(ERRORS_MAX * 3):
        breaker.trip("hook", ValueError("x"))
        now += WINDOW_S + 1
    assert not breaker.open
    states = []
    for _ in range(ERRORS_MAX):
        breaker.trip("hook", ValueError("x"))
        states.append(breaker.open)
    assert states == [False] * (ERRORS_MAX - 1) + [True]
    assert breaker.errors == {"hook: ValueError": 4 * ERRORS_MAX}


def test_with_an_open_breaker_nothing_is_begun_and_saves_under_way_are_given_up(node, answer) -> None:
    engine = Engine(node)
    engine.worker.hold_saves = True
    engine.submit("a", prompt(2, 2 * CHUNK), max_tokens=20)
    for _ in range(4):
        engine.step()
    assert engine.half.saves.pinned_blocks
    engine.half.breaker.open = True
    node.calls.clear()
    engine.submit("b", TEXT, max_tokens=20)
    engine.step()
    assert engine.half.saves.pinned_blocks == 0
    engine.worker.hold_saves = False
    engine.run()
    assert engine.tokens["b"][:2] == answer
    assert engine.half.shared.stats.misses[MissReason.BREAKER_OPEN] == 1
    assert set(node.calls) == {"abort quiet=False"}
    engine.assert_nothing_left()


@pytest.mark.parametrize("granted", [True, False])
def test_an_idle_engine_whose_breaker_opens_keeps_no_block(node, granted) -> None:
    """It makes no further step in which a save could end. Mutant: it goes to sleep with its references."""
    engine = Engine(node)
    engine.worker.hold_saves = True
    engine.control.manual = not granted
    engine.submit("a", TEXT, max_tokens=1, skip_reading_prefix_cache=True)
    for _ in range(4):
        engine.step()
    assert engine.half.saves.pinned_blocks and not engine.scheduler.requests
    engine.half.breaker.open = True
    assert not engine.scheduler.has_requests()
    assert engine.half.saves.pinned_blocks == 0
    assert engine.scheduler.reset_prefix_cache()


def test_an_error_is_one_line_and_said_once(caplog_vllm) -> None:
    breaker = Breaker(lambda: 0.0)
    for _ in range(3):
        breaker.trip("some_hook", ValueError("what"))
    lines = [r for r in caplog_vllm.records if "some_hook" in r.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0].getMessage()


def test_the_harmless_answer_to_a_step_is_no_jobs(node, monkeypatch) -> None:
    engine = Engine(node)
    monkeypatch.setattr(engine.half.loads, "take_ready", lambda: 1 / 0)
    assert engine.connector.build_connector_meta(None) == Jobs()


def test_shutdown_gives_leases_back_and_ends_the_conversation(node, answer) -> None:
    engine = Engine(node)
    engine.worker.hold_loads = True
    engine.submit("b", TEXT)
    engine.step()
    assert node.leases
    engine.connector.shutdown()
    assert not node.leases
    assert engine.control.closed


# --- adapters -----------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return str(tmp_path)


def test_kv_of_an_adapter_is_shared_with_the_same_adapter_only(node, adapter, answer) -> None:
    first = Engine(node).generate("a", TEXT, lora_request=LoRARequest("tuned", 1, adapter))
    assert first != answer
    assert len(node.objects) == 8
    other = Engine(node)
    assert other.generate("b", TEXT, lora_request=LoRARequest("tuned", 7, adapter)) == first
    assert other.half.shared.stats.pulled_tokens == 3 * CHUNK + 2 * BLOCK
    assert other.generate("c", TEXT) == answer
    other.assert_nothing_left()


def test_an_adapter_without_files_is_neither_saved_nor_loaded(node, tmp_path) -> None:
    engine = Engine(node)
    engine.generate("a", TEXT, lora_request=LoRARequest("tuned", 1, str(tmp_path / "nowhere")))
    assert node.calls == []
    assert engine.half.shared.stats.misses == {MissReason.LAYOUT_UNSUPPORTED: 1}
    engine.assert_nothing_left()


def test_a_session_whose_prompt_grows_is_left_alone(node) -> None:
    engine = Engine(node)
    engine.submit("a", TEXT, resumable=True)
    for _ in range(5):
        engine.step()
    assert node.calls == []


# --- everything at once -------------------------------------------------------------------------------


def one_turn(rng: random.Random, turn: int, engines: list[Engine], texts: list[list[int]]) -> None:
    """Something happens to one of the engines, or to the node, and then it takes a step."""
    engine, node = rng.choice(engines), engines[0].node
    if rng.random() < 0.3:
        params = dict(rng.choice([{}, *(p for e in engines for p in e.params.values())]))
        params |= {name: True for name in ("one_shot", "consume_once") if rng.random() < 0.1}
        text, more = rng.choice(texts), 0
        if rng.random() < 0.3:  # a next turn, or an answer that goes on
            said = rng.choice([text, *(each for e in engines for each in e.model_tokens.values())])
            text, more = said[:900], rng.randrange(30)
        if rng.random() < 0.3:
            params["live"] = more
        engine.submit(f"r{turn}", text, max_tokens=rng.randrange(1, 100), params=params)
    if rng.random() < 0.08 and engine.scheduler.requests:
        engine.abort(rng.choice(list(engine.scheduler.requests)))
    if rng.random() < 0.1 and node.objects:
        del node.objects[rng.choice(list(node.objects))]
    if rng.random() < 0.02:
        engines[-1].half.reset_cache()
    node.down = rng.random() < 0.05
    engine.worker.hold_saves = rng.random() < 0.4
    engine.worker.hold_loads = rng.random() < 0.3
    engine.worker.fail_load_at = rng.choice([None, None, None, 0, 1])
    engine.worker.fail_saves = rng.random() < 0.1
    engine.control.manual = rng.random() < 0.3
    if not engine.control.manual:
        engine.control.answer()
    engine.now += rng.random()
    node.wake()
    if engine.scheduler.has_requests():
        engine.step()


def calm(engines: list[Engine]) -> None:
    """Everything is answered and reported, and every engine runs until it is idle."""
    engines[0].node.down = False
    for engine in engines:
        engine.control.manual = engine.worker.hold_saves = engine.worker.hold_loads = False
        engine.control.answer()
    for engine in engines:
        engine.run(3000, tick_s=0.1)


@pytest.mark.parametrize("seed", range(12))
def test_storms(seed) -> None:
    """Engines of different kinds on one node, with aborts, preemptions, failures, evictions, slow answers and new
    weights: every token's KV is right, nothing is left, and whatever is stored is right and found."""
    rng = random.Random(seed)
    node = Node()
    engines = [
        Engine(
            node,
            num_blocks=rng.choice([60, 90]),
            max_batched=rng.choice([48, 96, 256]),
            ahead=ahead,
            write_back=rng.random() < 0.7,
        )
        for ahead in (rng.random() < 0.5, rng.random() < 0.5, False)
    ]
    texts = [prompt(number // 3, rng.randrange(5, 500)) for number in range(12)]
    for turn in range(160):
        one_turn(rng, turn, engines, texts)
    calm(engines)
    node.reserved.clear()  # of commits and aborts that the node was not there for; they expire
    for engine in engines:
        engine.assert_nothing_left()
    assert sum(engine.half.shared.stats.committed_objects for engine in engines) > 5
    check = Engine(node, prefix_caching=False, save=False)
    for number, text in enumerate(texts):
        check.generate(f"check{number}", text)
    assert check.half.shared.stats.pulled_tokens >= CHUNK
    check.assert_nothing_left()
