"""What the client gives out: leases to read and rights to write, as plain data that travels to workers.

Times are readings of the client's clock (`time.monotonic` unless told otherwise), counted from before the
request was sent, so the client's view of a duration ends before the node's does.
"""

import msgspec

from kvstore.client.address import NodeAddress
from kvstore.core import Key, MissReason, Namespace
from kvstore.wire import (
    Granted,
    LeaseId,
    NodeId,
    OnDisk,
    ReserveAnswer,
    ReserveItem,
    Resident,
)


class Found(msgspec.Struct, frozen=True):
    """What the index knows of a chain: nothing is leased.

    `num_keys` keys of the prefix are said to be held, by `nodes` (each once, in order of first use).
    `reason` says why it ends there; None when it is the whole chain. `on_disk` of them are on NVMe alone.
    """

    num_keys: int
    nodes: tuple[NodeId, ...]
    reason: MissReason | None
    on_disk: int = 0


class Copy(msgspec.Struct, frozen=True, gc=False):
    """One leased copy: where it is (`answer`), at which node, under which lease."""

    key: Key
    address: NodeAddress
    lease: LeaseId
    answer: Resident | OnDisk


class Promise(msgspec.Struct, frozen=True):
    """The leased copies of a chain's longest prefix, in order; each key from one node.

    `reason` says why the prefix ends there, None when everything asked for is promised. Until
    `expires_at` (client's clock) the copies are neither evicted nor reused.
    """

    namespace: Namespace
    copies: tuple[Copy, ...]
    expires_at: float
    reason: MissReason | None

    def __len__(self) -> int:
        return len(self.copies)


class Grant(msgspec.Struct, frozen=True):
    """The answer to one object of a reservation; `address` is the node that gave it, None if none did."""

    item: ReserveItem
    answer: ReserveAnswer
    address: NodeAddress | None

    @property
    def granted(self) -> Granted | None:
        """The right to write, if there is one."""
        return self.answer if isinstance(self.answer, Granted) else None


class Grants(msgspec.Struct, frozen=True):
    """Answers to a reservation, in the order asked; rights end at `expires_at` (client's clock)."""

    namespace: Namespace
    grants: tuple[Grant, ...]
    expires_at: float

    @property
    def granted(self) -> tuple[Grant, ...]:
        """Those that may be written."""
        return tuple(grant for grant in self.grants if grant.granted is not None)
