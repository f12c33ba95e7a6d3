"""What engines and tools call: async client, blocking facade, breaker, lookup, and the mover of bytes."""

from kvstore.client.address import NodeAddress

__all__ = ["NodeAddress"]
