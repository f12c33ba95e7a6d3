"""An OpenAI-compatible front for engines that share a store: prefill first, then decode, and on with another
when one dies."""

from kvstore.proxy.config import ProxyConfig, engine_url
from kvstore.proxy.run import run

__all__ = ["ProxyConfig", "engine_url", "run"]
