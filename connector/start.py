"""How the halves come to be: with the real client, and with a mover over Mooncake."""

from typing import Any

from connector.background import Background
from connector.compat import worker_rank
from connector.config import Config, read_token
from connector.control import Control
from connector.guard import Breaker
from connector.layerwise import LayerwiseHalf
from connector.metadata import Rank
from connector.pinning import pin
from connector.scheduler import SchedulerHalf
from connector.worker import WorkerHalf
from kvstore.client import ClientConfig, Mover, open_mover


def open_control(config: Config, *, whole_objects: bool) -> Control:
    """The conversation with the store; it need not be there yet.

    Args:
        config: the connector's.
        whole_objects: one worker reads all of each object.

    Raises:
        BadConfiguration: the token cannot be read.
    """
    return Background(
        ClientConfig(
            node=config.node,
            index_url=config.redis,
            token=read_token(config),
            request_timeout_s=config.request_timeout_s,
            # So that there is time left to ask the node: a Redis that hangs must not cost the node's hits.
            index_timeout_s=min(config.request_timeout_s, config.lookup_timeout_s / 2),
            whole_objects=whole_objects,
        )
    )


def start_scheduler_half(
    vllm_config: Any, kv_cache_config: Any, config: Config, breaker: Breaker
) -> SchedulerHalf:
    """The scheduler half. Raises BadConfiguration."""
    control = open_control(config, whole_objects=vllm_config.parallel_config.world_size == 1)
    return SchedulerHalf(vllm_config, kv_cache_config, config, control, breaker)


def start_worker_half(vllm_config: Any, kv_cache_config: Any, config: Config) -> WorkerHalf:
    """The worker half; it opens its mover when vLLM has registered the KV cache."""

    def opened() -> Mover:
        mover = open_mover(
            config.node,
            transfer=config.transfer,
            host=config.host,
            protocol=config.protocol,
            devices=config.devices,
            token=read_token(config),
            staging_bytes=config.staging_bytes,
        )
        pin(mover.staging)
        return mover

    half = LayerwiseHalf if config.layerwise else WorkerHalf
    return half(opened, vllm_config, kv_cache_config, Rank(*worker_rank()))
