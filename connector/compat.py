"""Every import of vLLM that the connector makes, but for the factory at registration and the class that does nothing.

Importing this file does no work and loads nothing that vLLM has not loaded before it looks for a connector,
because API servers import it too. A version that was not read and tested (`connector.versions`) is refused before
that: the engine serves as if there were no store (`connector.bystander`). Where the known ones differ, it is told by
what there is. vLLM is untyped here (its types cost minutes to check).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    Counter,
    Gauge,
    Histogram,
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus
from vllm.v1.utils import tensor_data

_DRAFTERS = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
"""Methods whose draft layers are layers like others: causal attention, a token's KV in its slot of a block."""

__all__ = [
    "CacheHitSource",
    "Counter",
    "Gauge",
    "Histogram",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "ModelFacts",
    "SupportsHMA",
    "attention_backends",
    "attention_isa",
    "block_size_of",
    "logger",
    "is_mla",
    "layer_specs",
    "model_facts",
    "pool_has_cached",
    "pool_is_unused",
    "reach_of",
    "state_name",
    "tensor_data",
    "total_kv_heads",
    "unsupported_engine",
    "unsupported_spec",
    "uses_mla",
    "was_aborted",
    "was_preempted",
    "worker_rank",
]


def logger(name: str) -> logging.Logger:
    """A logger whose lines appear in vLLM's log, in vLLM's format, under vLLM's level."""
    return logging.getLogger(f"vllm.{name}")


def block_size_of(kv_cache_config: Any) -> int:
    """Tokens in a block of the first KV cache group."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def pool_is_unused(pool: Any) -> bool:
    """Whether nobody holds a block of the pool; vLLM itself holds the null block for ever."""
    return int(pool.get_num_free_blocks()) == int(pool.num_gpu_blocks) - 1


def pool_has_cached(pool: Any) -> bool:
    """Whether a request could hit a block of the pool."""
    return any(block.block_hash is not None for block in pool.blocks)


def was_aborted(request: Any) -> bool:
    """Whether a finished request ended early: its client left, it was refused, or it failed."""
    early = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)
    return request.status in early


def was_preempted(request: Any) -> bool:
    """Whether it asks again because its blocks were taken from it; vLLM counts such queries apart."""
    return int(request.num_preemptions) > 0


def _sleeps(vllm_config: Any) -> bool:
    """Whether the engine may unmap its KV cache without a word to the connector, as vLLM 0.32 does."""
    model = vllm_config.model_config
    told = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
    return model is not None and bool(model.enable_sleep_mode) and not told


def unsupported_engine(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why the KV of this engine can be neither saved nor loaded, as far as configurations tell, or None.

    The worker half has its own word on the tensors (layout, strides, tile format).
    """
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    refusals = (
        (not groups, "a model without attention"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (_sleeps(vllm_config), "sleep mode with a vLLM older than 0.33"),
        *_unsupported_drafts(vllm_config, groups),
    )
    for refused, what in refusals:
        if refused:
            return f"{what} is not supported yet"
    reasons = (unsupported_spec(spec) for group in groups for spec in layer_specs(group).values())
    return next((reason for reason in reasons if reason), None) or _unsupported_mix(vllm_config, groups)


def _unsupported_mix(vllm_config: Any, groups: Any) -> str | None:
    """Why these groups, each of which is understood, are not understood together."""
    specs = [spec for group in groups for spec in layer_specs(group).values()]
    parallel = vllm_config.parallel_config
    state = any(isinstance(spec, MambaSpec) for spec in specs)
    mixed = any(len({reach_of(spec) for spec in layer_specs(group).values()}) > 1 for group in groups)
    refusals = (
        (all(reach_of(spec)[0] != "full" for spec in specs), "a model without attention over all tokens"),
        (mixed, "a KV cache group of layers that look back differently far"),
        (
            not all(group.enable_kv_transfer for group in groups),
            "a KV cache group that vLLM does not transfer",
        ),
        (len(groups) > 1 and any(map(is_mla, specs)), "MLA beside other KV"),
        (len({spec.block_size for spec in specs}) > 1, "a model whose KV cache groups differ in block size"),
        (
            len(groups) > 1 and parallel.pipeline_parallel_size > 1,
            "pipeline parallelism of a model with several KV cache groups",
        ),
        (state and vllm_config.speculative_config is not None, "speculative decoding with a recurrent state"),
    )
    return next((f"{what} is not supported yet" for refused, what in refusals if refused), None)


def reach_of(spec: Any) -> tuple[str, int]:
    """How far back a layer looks, and tokens of its window or chunk; see `connector.kinds`."""
    if isinstance(spec, SlidingWindowSpec):
        return "window", spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked", spec.attention_chunk_size
    return ("state" if isinstance(spec, MambaSpec) else "full"), 0


def state_name(spec: Any) -> str:
    """What is in a recurrent state: the kind of layer, dtypes and shapes on a rank, and the order of axes."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first  # noqa: PLC0415 - if needed

    parts = " ".join(
        f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        for dtype, shape in zip(spec.dtypes, spec.shapes, strict=True)
    )
    order = "dim first" if is_conv_state_dim_first() else "dim last"
    return f"{spec.mamba_type.name.lower()} {parts} {order}".replace(", ", ",")


def _has_draft_kv(speculative: Any) -> bool:
    """Whether layers of drafts have KV beside that of the model, in the same blocks."""
    return speculative is not None and bool(speculative.uses_draft_kv_cache())


def _unsupported_drafts(vllm_config: Any, groups: Any) -> Iterator[tuple[bool, str]]:
    """What of the draft layers cannot be served, each with whether it is so."""
    if not _has_draft_kv(drafts := vllm_config.speculative_config):
        return
    yield drafts.method not in _DRAFTERS, f"KV of speculative decoding by {drafts.method}"
    yield len(groups) > 1, "KV of drafts beside several KV cache groups"
    draft_tp, tp = (
        x.tensor_parallel_size for x in (drafts.draft_parallel_config, vllm_config.parallel_config)
    )
    yield draft_tp != tp, "a draft model of another tensor parallel size than the model"


def layer_specs(group: Any) -> dict[str, Any]:
    """Layer name to the specification of its KV cache, for the layers of one group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def is_mla(spec: Any) -> bool:
    """Whether a layer stores one latent vector per token instead of keys and values per head."""
    return isinstance(spec, MLAAttentionSpec)


def uses_mla(vllm_config: Any) -> bool:
    """Whether the whole model does. False where vLLM only probes, without a model."""
    return vllm_config.model_config is not None and bool(vllm_config.model_config.use_mla)


def total_kv_heads(vllm_config: Any) -> int:
    """KV heads of a layer of the unsharded model; MLA has one."""
    return 1 if uses_mla(vllm_config) else int(vllm_config.model_config.get_total_num_kv_heads())


def worker_rank() -> tuple[int, int]:
    """This worker's PP and TP rank. vLLM has formed its groups before it makes the connector."""
    from vllm.distributed import get_pp_group, get_tp_group  # noqa: PLC0415 - only workers have groups

    return int(get_pp_group().rank_in_group), int(get_tp_group().rank_in_group)


def attention_backends(vllm_config: Any, layer_names: Iterable[str]) -> set[str]:
    """Names of the attention backends that read and write these layers' KV."""
    layers = vllm_config.compilation_config.static_forward_context
    return {str(layers[name].get_attn_backend().get_name()) for name in layer_names}


def attention_isa(vllm_config: Any, spec: Any) -> str:
    """The instruction set that CPU attention packs its tiles for on this machine: vec, vec16, amx, neon, ..."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - only where KV is on CPU

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    return str(_get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine serves, in plain values.

    Args:
        weights: folder of the weights, or a single file.
        load_format: as vLLM names it.
        ranks: tensor and pipeline parallel size.
        max_model_len: longest request, in tokens.
        config: the model's configuration, nested as in its config.json.
        engine: what the engine adds to it (dtype, quantisation, ...).
        drafts: the same of what makes drafts, if that has KV of its own.
    """

    weights: Path
    load_format: str
    ranks: tuple[int, int]
    max_model_len: int
    config: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    drafts: "ModelFacts | None" = None


def model_facts(vllm_config: Any) -> ModelFacts:
    """What this engine serves, in plain values."""
    drafts = vllm_config.speculative_config
    facts = _facts_of(vllm_config.model_config, vllm_config.load_config, vllm_config.parallel_config)
    if not _has_draft_kv(drafts):
        return facts
    load = drafts.draft_load_config or vllm_config.load_config
    of_drafts = _facts_of(drafts.draft_model_config, load, vllm_config.parallel_config)
    own_dtype = drafts.kv_cache_dtype != vllm_config.cache_config.cache_dtype
    method = {
        "method": drafts.method,
        "parallel_drafting": drafts.parallel_drafting,
        "kv_cache_dtype": drafts.kv_cache_dtype if own_dtype else None,
    }
    return replace(facts, drafts=replace(of_drafts, engine={**of_drafts.engine, **method}))


def _facts_of(model: Any, load: Any, parallel: Any) -> ModelFacts:
    media = model.multimodal_config
    return ModelFacts(
        weights=_weights_folder(model.model_weights or model.model, model.revision, load.download_dir),
        load_format=str(load.load_format),
        ranks=(parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
        max_model_len=model.max_model_len,
        config=model.hf_config.to_dict(),
        engine={
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": None if model.quantization is None else str(model.quantization),
            "disable_sliding_window": model.disable_sliding_window,
            "model_class_overrides": model.model_class_overrides,
            "mm_processor_kwargs": media and media.mm_processor_kwargs,
            "video_pruning_rate": media and media.video_pruning_rate,
        },
    )


def _weights_folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Where vLLM read the weights: a local path, or what its download left in the cache of Hugging Face."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only where vLLM has used it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return Path(model)  # the fingerprint will say that nothing is there


def unsupported_spec(spec: Any) -> str | None:
    """Only what was read and tested: exact types, so that none slips through."""
    match spec:
        case _ if type(spec) is MambaSpec:
            return _unsupported_state(spec)
        case _ if type(spec) is SlidingWindowSpec:
            unknown = spec.extra_retained_tokens != 0
        case _ if type(spec) is ChunkedLocalAttentionSpec:
            unknown = False
        case _ if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
            windowed = spec.sliding_window is not None or spec.attention_chunk_size is not None
            unknown = windowed or spec.non_causal
        case _:
            return f"a KV cache of kind {type(spec).__name__} is not supported yet"
    if unknown:
        return (
            "attention that is not causal, or over a window or chunks without groups of their own "
            "(--disable-hybrid-kv-cache-manager), is not supported yet"
        )
    if spec.tokens_per_state != 1 or spec.page_size_padded is not None:
        return "compressed or padded KV pages are not supported yet"
    if spec.kv_quant_mode not in {KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR}:
        return f"KV quantised as {spec.kv_quant_mode.name.lower()} is not supported yet"
    if spec.state_content_bytes is not None or spec.num_head_slots is not None:
        return "KV that an attention backend packs in its own way is not supported yet"
    return None


def _unsupported_state(spec: Any) -> str | None:
    """Only states at the ends of blocks, which is what vLLM keeps with prefix caching."""
    if spec.mamba_cache_mode != "align":
        return (
            f"a recurrent state in cache mode {spec.mamba_cache_mode} is not supported yet: "
            "leave prefix caching on, and --mamba-cache-mode at align"
        )
    if spec.num_speculative_blocks or spec.tokens_per_state != -1 or spec.tp_replicated:
        return "a recurrent state that is replicated, compressed or speculative is not supported yet"
    return None
