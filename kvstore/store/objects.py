"""What the store knows of an object: its copies, who fills it, who reads it.

An object is the bytes of one reservation of one key, so a generation names it. At most one object of a
key is *listed* (found by its key). One that was dropped or turned out bad is unlisted at once, so that the
key may be stored anew, and lives on for as long as leases or a verification need its pages.
"""

from collections.abc import Hashable

from kvstore.core import Event, Extents, Key, State, Tier, step
from kvstore.store.clients import Client
from kvstore.store.namespaces import OpenNamespace
from kvstore.wire import ClientId, Generation, LeaseId, Resident


class Copy:
    """An object in a tier."""

    __slots__ = ("extents", "state")

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        self.state = State.FILLING

    def advance(self, event: Event) -> None:
        """The next state of its life; an illegal one is our bug."""
        self.state = step(self.state, event)


class Reservation:
    """A writer's right to fill an object, until `deadline_s`."""

    __slots__ = ("client", "deadline_s", "ended", "object", "started_s")

    def __init__(self, client: Client, started_s: float, deadline_s: float, filling: "Object") -> None:
        self.client = client
        self.started_s = started_s
        self.deadline_s = deadline_s
        self.ended = False
        self.object = filling


class Lease:
    """A reader's right to objects, until `deadline_s`; one object per key."""

    __slots__ = ("client", "deadline_s", "ended", "id", "objects", "started_s")

    def __init__(self, client: Client, lease_id: LeaseId, started_s: float, deadline_s: float) -> None:
        self.client = client
        self.id = lease_id
        self.started_s = started_s
        self.deadline_s = deadline_s
        self.ended = False
        self.objects: dict[Key, Object] = {}


class Object:
    """The runs of one chunk, in the tiers that have a copy."""

    __slots__ = (
        "checks",
        "cold",
        "copies",
        "depth",
        "entry",
        "generation",
        "key",
        "leases",
        "listed",
        "namespace",
        "pages",
        "parent",
        "parent_entry",
        "reader",
        "ready_s",
        "reservation",
        "resident",
        "shared",
        "size_bytes",
        "table",
        "writer",
    )

    def __init__(self, key: Key, parent: Key, depth: int, namespace: OpenNamespace, size_bytes: int) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        # Names in the policy, with the depth, so that parents cannot form a cycle, whatever clients say.
        self.entry: Hashable = (depth, key)
        self.parent_entry: Hashable = (depth - 1, parent)
        self.namespace = namespace
        self.size_bytes = size_bytes
        self.pages = 0
        self.generation = Generation(b"")
        self.table = b""
        self.resident: Resident | None = (
            None  # what who leases it is told, while its copy in DRAM can be read
        )
        self.copies: dict[Tier, Copy] = {}
        self.listed = True
        self.reservation: Reservation | None = None
        self.leases = 0  # how many leases have it
        self.checks = 0  # how many verifications read it
        self.ready_s = 0.0  # when it was committed
        self.writer = ClientId(b"")
        self.reader: ClientId | None = None  # the first client to use it that did not write it
        self.shared = False  # whether there was another one
        self.cold = False

    @property
    def pinned(self) -> bool:
        """Whether its pages may not be given to others."""
        return self.leases > 0 or self.checks > 0 or self.reservation is not None

    def used_by(self, client: ClientId) -> None:
        """A client found it useful. Others than its writer make it warm."""
        if client == self.writer:
            return
        if self.reader is None:
            self.reader = client
        elif self.reader != client:
            self.shared = True
        self.cold = False

    def cool(self, client: ClientId) -> None:
        """A client will not need it again. It becomes cold unless others used it."""
        if not self.shared and self.reader in {None, client}:
            self.cold = True

    def __repr__(self) -> str:
        states = ", ".join(f"{tier}: {copy.state}" for tier, copy in self.copies.items())
        return f"<Object {self.key.hex()[:8]} {self.size_bytes} B {states}, {self.leases} leases>"
