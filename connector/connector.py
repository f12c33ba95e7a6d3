"""The class that vLLM makes: once in its scheduler, once in every worker. One line per hook.

What the hooks do is with the halves, `connector.scheduler` and `connector.worker`; when they are called is with
vLLM. Hooks that are not overridden here have the right default. No exception leaves a hook (`connector.guard`).
"""
# ruff: noqa: D102 - hooks of vLLM are documented there

import time
from typing import Any

import msgspec

from connector import start
from connector.compat import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    logger,
    uses_mla,
)
from connector.config import Config, read_config
from connector.guard import Breaker, harmless
from connector.layerwise import LayerwiseHalf
from connector.metadata import Handshake, Jobs, Reports
from connector.metrics import EngineStats, PromMetrics, prom_metrics, with_step

log = logger(__name__)


def _nothing() -> None:
    return None


def _no_tokens() -> tuple[int | None, bool]:
    return 0, False


def _blocks_may_go() -> tuple[bool, dict[str, Any] | None]:
    return False, None


def _not_reset() -> bool | None:
    return False


def _no_reports() -> Reports | None:
    return None


def _no_events() -> tuple[Any, ...]:
    return ()


def _no_stats() -> EngineStats | None:
    return None


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's view of the store.

    Args:
        vllm_config: vLLM's configuration.
        role: which half this is.
        kv_cache_config: the KV cache; vLLM looks for an argument of exactly this name.

    Raises:
        BadConfiguration: `kv_connector_extra_config` cannot work. Nothing is raised after that.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._settings()
        self.breaker = Breaker(time.monotonic)
        if role is KVConnectorRole.SCHEDULER:
            self._recompute_failed_loads()
            self._scheduler = start.start_scheduler_half(vllm_config, kv_cache_config, config, self.breaker)
        else:
            self._worker = start.start_worker_half(vllm_config, kv_cache_config, config)

    def _settings(self) -> Config:
        """The user's settings, with `save` and `load` as the engine's role allows them."""
        transfer = self._kv_transfer_config
        config = read_config(transfer.kv_connector_extra_config)
        return msgspec.structs.replace(
            config, save=config.save and transfer.is_kv_producer, load=config.load and transfer.is_kv_consumer
        )

    def _recompute_failed_loads(self) -> None:
        """A load that cannot be trusted is computed: vLLM's default would fail the request instead."""
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            log.info("kv_load_failure_policy is recompute: what cannot be loaded is computed")

    # --- facts ----------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss, no more."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Blocks whose heads are contiguous, where there are heads. vLLM takes it as a wish."""
        return None if uses_mla(vllm_config) else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs do not call the hooks of layers."""
        return bool(extra_config.get("layerwise"))

    # --- scheduler half -------------------------------------------------------------------------------

    @harmless(_nothing, timed=False)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    @harmless(_nothing, timed=False)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduler.shake_hands(metadata)

    @harmless(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    @harmless(_no_tokens)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @harmless(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    @harmless(dict[CacheHitSource, int])
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    @harmless(Jobs)
    def build_connector_meta(self, scheduler_output: Any) -> Jobs:
        return self._scheduler.build_connector_meta(scheduler_output)

    @harmless(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update_connector_output(connector_output)

    @harmless(_blocks_may_go)
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    @harmless(_blocks_may_go)
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    @harmless(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    @harmless(_not_reset, timed=False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    @harmless(_no_events)
    def take_events(self) -> tuple[Any, ...]:
        """Called when the scheduler has taken a step's output; events there are none."""
        self._scheduler.step_ended()
        return ()

    # --- worker half ----------------------------------------------------------------------------------

    @harmless(_nothing, timed=False)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register_kv_caches(kv_caches)

    @harmless(lambda: Handshake(unsupported="the worker's half of the connector has failed"), timed=False)
    def get_handshake_metadata(self) -> Handshake:
        return self._worker.get_handshake_metadata()

    @harmless(_nothing, timed=False)
    def unregister_kv_caches(self) -> None:
        self._worker.leave_blocks()

    @harmless(_nothing, timed=False)
    def restore_kv_caches(self) -> None:
        self._worker.return_to_blocks()

    @harmless(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load_kv(self._get_connector_metadata())

    @harmless(_nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    @harmless(_nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if isinstance(self._worker, LayerwiseHalf):
            self._worker.save_layer(layer_name)

    @harmless(_nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Called before every step's forward pass. References protect the blocks of what was preempted."""
        self._worker.begin_saves(kv_connector_metadata)

    @harmless(_nothing)
    def wait_for_save(self) -> None:
        """For a runner that does not call the hook above."""
        self._worker.begin_saves(self._get_connector_metadata())

    @harmless(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results(finished_req_ids)

    @harmless(set[int])
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    @harmless(_no_reports)
    def build_connector_worker_meta(self) -> Reports | None:
        return self._worker.build_connector_worker_meta()

    # --- metrics --------------------------------------------------------------------------------------

    @harmless(_no_stats)
    def get_kv_connector_stats(self) -> EngineStats | None:
        scheduling = self._role is KVConnectorRole.SCHEDULER
        counted = self._scheduler.take_stats() if scheduling else None
        return with_step(counted, self.breaker.take_spent_s())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EngineStats:
        return EngineStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- both -----------------------------------------------------------------------------------------

    @harmless(_nothing, timed=False)
    def shutdown(self) -> None:
        (self._scheduler if self._role is KVConnectorRole.SCHEDULER else self._worker).shutdown()
