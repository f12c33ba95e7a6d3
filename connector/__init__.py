"""The vLLM connector: prefill pushes KV into the store, decode pulls it.

vLLM finds it as `"kv_connector": "KVStoreConnector", "kv_connector_module_path": "connector"`, or by its
name alone through the plugin entry point `register`. The class is imported on first use: this package is
also imported by processes that only look for plugins, and that must start under any version of vLLM. Under one that
is not known here the class is one that does nothing.
"""

import contextlib
import logging
from typing import Any

from connector.bystander import bystander
from connector.versions import unsupported_version

__all__ = ["KVStoreConnector", "register"]

NAME = "KVStoreConnector"

log = logging.getLogger(f"vllm.{__name__}")


def register() -> None:
    """Entry point of `vllm.general_plugins`: lets vLLM find the connector by name, also inside MultiConnector.

    Never raises: vLLM calls it in every process, also where nobody has asked for the connector.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

        with contextlib.suppress(
            ValueError
        ):  # vLLM loads its plugins once per process, but not always only once
            KVConnectorFactory.register_connector(NAME, __name__, NAME)
    except Exception as error:  # noqa: BLE001 - see above
        log.warning("%s cannot be registered: %s", NAME, unsupported_version() or error)


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module 'connector' has no attribute {name!r}")
    if reason := unsupported_version():
        return bystander(NAME, reason)
    from connector.connector import KVStoreConnector  # noqa: PLC0415 - see the module's first lines

    return KVStoreConnector
