"""Models of several kinds of KV that are not understood do without the store: one line, and counted as such."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.compat import unsupported_engine
from connector.config import read_config
from connector.guard import Breaker
from connector.scheduler import SchedulerHalf
from kvstore.core import MissReason
from tests.connector.support import BLOCK, Engine, FakeControl, Node, prompt
from tests.connector.test_boundaries import chunked, full, groups_of, state, window

SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def config(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups_of(specs))


def mamba(**more: Any) -> MambaSpec:
    values = {"shapes": ((2, 2),), "dtypes": (torch.float32,), "mamba_cache_mode": "align", **more}
    return MambaSpec(block_size=BLOCK, **values)


@pytest.fixture
def engine() -> Engine:
    return Engine(Node())


def assert_said_and_counted(engine: Engine, some: KVCacheConfig, reason: str, caplog: Any) -> None:
    """One line says why, and a request that asks counts as a miss of the layout."""
    half = SchedulerHalf(engine.config, some, read_config({}), FakeControl(Node()), Breaker(lambda: 0.0))
    [line] = [line for line in caplog.text.splitlines() if "neither saves nor loads KV" in line]
    assert reason in line
    request = engine.submit("a", prompt(1, 200))
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, None, 0)
    assert half.shared.stats.misses[MissReason.LAYOUT_UNSUPPORTED] == 1


@pytest.mark.parametrize(
    "specs",
    [
        (window(BLOCK, 64), full(BLOCK)),
        (window(BLOCK, 64), window(BLOCK, 64), window(BLOCK, 20), full(BLOCK)),
        (chunked(BLOCK, 512), full(BLOCK)),
        (state(BLOCK), full(BLOCK), full(BLOCK)),
        (state(BLOCK), window(BLOCK, 64), full(BLOCK)),
    ],
)
def test_models_of_several_kinds_are_understood(engine, specs) -> None:
    assert unsupported_engine(engine.config, config(*specs)) is None


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ((window(BLOCK, 64), window(BLOCK, 32)), "without attention over all tokens"),
        ((mamba(),), "without attention over all tokens"),
        ((full(BLOCK), window(2 * BLOCK, 64)), "differ in block size"),
        ((full(BLOCK), mamba(mamba_cache_mode="none")), "cache mode none"),
        ((full(BLOCK), mamba(mamba_cache_mode="all")), "cache mode all"),
        ((full(BLOCK), mamba(num_speculative_blocks=1)), "speculative"),
        ((full(BLOCK), mamba(tp_replicated=True)), "replicated"),
        (
            (full(BLOCK), SlidingWindowSpec(sliding_window=64, extra_retained_tokens=3, **SHAPE)),
            "groups of their own",
        ),
        ((window(BLOCK, 64), FullAttentionSpec(sliding_window=64, **SHAPE)), "groups of their own"),
        ((full(BLOCK), RSWASpec(rswa_window=64, **SHAPE)), "RSWASpec"),
        ((full(BLOCK), MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})), "MLA beside other KV"),
    ],
)
def test_kinds_that_are_not_understood(engine, specs, reason, caplog_vllm) -> None:
    assert reason in str(unsupported_engine(engine.config, config(*specs)))
    assert_said_and_counted(engine, config(*specs), reason, caplog_vllm)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v, k: setattr(v.parallel_config, "pipeline_parallel_size", 2), "pipeline parallelism"),
        (lambda v, k: setattr(v.parallel_config, "decode_context_parallel_size", 2), "decode context"),
        (lambda v, k: setattr(v.parallel_config, "prefill_context_parallel_size", 2), "prefill context"),
        (lambda v, k: setattr(k.kv_cache_groups[0], "enable_kv_transfer", False), "does not transfer"),
        (
            lambda v, k: setattr(v, "speculative_config", SimpleNamespace(uses_draft_kv_cache=lambda: False)),
            "speculative decoding with a recurrent state",
        ),
    ],
)
def test_engines_that_are_not_understood_with_several_kinds(engine, change, reason, caplog_vllm) -> None:
    some = config(state(BLOCK), full(BLOCK))
    assert unsupported_engine(engine.config, some) is None
    change(engine.config, some)
    assert_said_and_counted(engine, some, reason, caplog_vllm)


def test_a_group_of_layers_that_look_back_differently_far(engine, caplog_vllm) -> None:
    specs = {"a": window(BLOCK, 64), "b": window(BLOCK, 32)}
    mixed = KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))
    some = replace(config(full(BLOCK)), kv_cache_groups=[*config(full(BLOCK)).kv_cache_groups, mixed])
    assert_said_and_counted(engine, some, "differently far", caplog_vllm)
