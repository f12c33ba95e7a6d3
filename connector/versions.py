"""Which versions of vLLM this connector knows. Imports nothing of vLLM: it is asked before that is tried."""

from importlib.metadata import version

VERSIONS = ("0.32.", "0.33.")
"""Prefixes of the versions of vLLM whose connector API this connector was written for; tests hold it against both."""


def unsupported_version(installed: str | None = None) -> str | None:
    """Why this vLLM cannot be served, or None. `installed` defaults to the version that is installed."""
    found = installed or version("vllm")
    if found.startswith(VERSIONS):
        return None
    known = " and ".join(f"{prefix}x" for prefix in VERSIONS)
    return f"this connector knows vLLM {known}, not {found}; install a matching kvstore or vLLM"
