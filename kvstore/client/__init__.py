"""What engines and tools call: async client, blocking facade, breaker, lookup, and the mover of bytes."""

from kvstore.client.address import NodeAddress
from kvstore.client.mover import Mover, PullItem, PullResult, PushItem, PushResult
from kvstore.client.staging import Slot, Staging, StagingStats

__all__ = [
    "Mover",
    "NodeAddress",
    "PullItem",
    "PullResult",
    "PushItem",
    "PushResult",
    "Slot",
    "Staging",
    "StagingStats",
]
