"""What engines and tools call: async client, blocking facade, breaker, lookup, and the mover of bytes.

The answers of nodes are plain data of the protocol; they are part of this door, so that who uses a client
need not know how it talks.
"""

from kvstore.client.address import NodeAddress
from kvstore.client.arrivals import Arrivals
from kvstore.client.breaker import Breaker, BreakerOpen, BreakerState
from kvstore.client.client import Client, ClientStats
from kvstore.client.config import ClientConfig
from kvstore.client.control import ControlClient
from kvstore.client.facade import KVStore, Put
from kvstore.client.loop_thread import LoopThread
from kvstore.client.mover import Mover, PullItem, PullResult, PushItem, PushResult
from kvstore.client.opening import TRANSFERS, open_mover, open_transfer
from kvstore.client.promise import Copy, Found, Grant, Grants, Promise
from kvstore.client.promoting import Arrival
from kvstore.client.staging import Slot, Staging, StagingStats
from kvstore.wire import (
    Busy,
    Committed,
    Exists,
    Granted,
    NodeId,
    OnDisk,
    Refused,
    ReportItem,
    ReserveItem,
    Resident,
    Stale,
)

__all__ = [
    "Arrival",
    "Arrivals",
    "Breaker",
    "BreakerOpen",
    "BreakerState",
    "Busy",
    "Client",
    "ClientConfig",
    "ClientStats",
    "Committed",
    "ControlClient",
    "Copy",
    "Exists",
    "Found",
    "Grant",
    "Granted",
    "Grants",
    "KVStore",
    "LoopThread",
    "Mover",
    "NodeAddress",
    "NodeId",
    "OnDisk",
    "Promise",
    "PullItem",
    "PullResult",
    "PushItem",
    "PushResult",
    "Put",
    "Refused",
    "ReportItem",
    "ReserveItem",
    "Resident",
    "Slot",
    "TRANSFERS",
    "Staging",
    "StagingStats",
    "Stale",
    "open_mover",
    "open_transfer",
]
