"""The connector of an engine whose vLLM this one does not know: it does nothing, and the engine serves on.

Made from whatever connector API that vLLM has, since nothing else of it can be relied upon.
"""

import logging
from functools import cache
from typing import Any

log = logging.getLogger(f"vllm.{__name__}")


@cache
def bystander(name: str, reason: str) -> type[Any]:
    """A connector class of this name that does nothing, and says why when it is made.

    Raises:
        ImportError: that vLLM has no connector API of this kind at all.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415 - see the first lines

        bases = [base.KVConnectorBase_V1, *([base.SupportsHMA] if hasattr(base, "SupportsHMA") else [])]
        metadata = base.KVConnectorMetadata
    except (ImportError, AttributeError) as error:
        raise ImportError(reason) from error
    hooks = dict.fromkeys(set().union(*(b.__abstractmethods__ for b in bases)), _nothing)
    return type(name, (_Bystander, *bases), hooks | _hooks(metadata) | {"reason": reason})


class _Bystander:
    """What it says once, in the engine's log."""

    reason = ""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg] # vLLM's base class
        log.error("%s: this engine does without the store", self.reason)


def _hooks(metadata: type[Any]) -> dict[str, Any]:
    """Those whose "nothing" is not None."""
    return {
        "requires_kv_delivery": False,
        "get_num_new_matched_tokens": lambda self, request, num_computed_tokens: (0, False),
        "build_connector_meta": lambda self, scheduler_output: metadata(),
        "request_finished": lambda self, request, block_ids: (False, None),
        "request_finished_all_groups": lambda self, request, block_ids: (False, None),
        "set_xfer_handshake_metadata_pp_aware": _nothing,
    }


def _nothing(*_: Any, **__: Any) -> None:
    return None
