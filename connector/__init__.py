"""The vLLM connector: prefill pushes KV into the store, decode pulls it.

vLLM finds it as `"kv_connector": "KVStoreConnector", "kv_connector_module_path": "connector"`, or by its
name alone through the plugin entry point `register`. The class is imported on first use: this package is
also imported by processes that only look for plugins.
"""

from typing import Any

__all__ = ["KVStoreConnector", "register"]

NAME = "KVStoreConnector"


def register() -> None:
    """Entry point of `vllm.general_plugins`: lets vLLM find the connector by name, also inside MultiConnector."""
    from connector.compat import register_connector  # noqa: PLC0415 - see the module's first lines

    register_connector(NAME, "connector.connector")


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module 'connector' has no attribute {name!r}")
    from connector.connector import KVStoreConnector  # noqa: PLC0415 - see the module's first lines

    return KVStoreConnector
