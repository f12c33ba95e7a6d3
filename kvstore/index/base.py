"""The contract of the index: which nodes say they hold a key.

The index is soft state. It may forget anything at any moment and may be wrong; it must never be believed:
a reader asks the node. Nothing in it takes part in identity, so losing all of it costs hits only.
Clauses every implementation keeps (tests/contracts/index.py):

* `merge` of a node's states changes that node's entries only, whoever else publishes the same keys.
* `lookup` answers for each key the entries that were merged last and have not expired.
* Every call ends within `timeout_s` of the implementation or raises `IndexDown`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvstore.core import Key, Namespace, Tier
from kvstore.wire import BootId, NodeId


class Location(NamedTuple):
    """A node says that it holds a key in a tier; `hour` is when it last said so (hours since 1970)."""

    node: NodeId
    tier: Tier
    hour: int


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's heartbeat says of it."""

    node: NodeId
    boot: BootId
    control: str  # "host:port" as clients reach it
    free_bytes: int = 0
    arena_bytes: int = 0


class Index(Protocol):
    """Where keys are."""

    async def lookup(self, keys: Sequence[Key]) -> list[tuple[Location, ...]]:
        """Entries of a chain's keys, in order, in at most two round trips.

        The list ends with the last key of the longest prefix that has entries: its length is the
        length of that prefix.
        """

    async def holders(self, keys: Sequence[Key]) -> list[tuple[Location, ...]]:
        """Entries of each of these keys, in order, none where there are none: keys that are no chain.

        One round trip.
        """

    async def merge(self, node: NodeId, states: Mapping[Key, Tier | None]) -> None:
        """Sets what `node` holds: a tier, or None for "not any more". Idempotent."""

    async def heartbeat(self, record: NodeRecord, expiry_s: float) -> bool:
        """Announces a node for `expiry_s` seconds. False: the index has lost its data since the last call
        (flushed, restarted, replaced): publish everything again."""

    async def leave(self, node: NodeId) -> None:
        """Withdraws a node's heartbeat at its orderly end."""

    async def nodes(self) -> list[NodeRecord]:
        """The nodes whose heartbeat has not expired."""

    async def put_manifest(self, namespace: Namespace, manifest: bytes) -> None:
        """Remembers a manifest, for diagnosis only."""

    async def manifest(self, namespace: Namespace) -> bytes | None:
        """A remembered manifest."""

    async def close(self) -> None:
        """Gives connections back."""
