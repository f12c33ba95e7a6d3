"""A shared, tiered KV-cache store for LLM engines."""

__version__ = "0.1.0"
