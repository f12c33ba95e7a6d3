"""What the store knows of an object: its copies, who fills it, who reads it, where it is going.

An object is the bytes of one reservation of one key, so a generation names it. At most one object of a
key is *listed* (found by its key). One that was dropped or turned out bad is unlisted at once, so that the
key may be stored anew, and lives on for as long as leases or a verification need its pages.
"""

from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from kvstore.core import Event, Extents, Key, MissReason, Namespace, State, Tier, seal, step
from kvstore.store.clients import Client
from kvstore.store.namespaces import OpenNamespace
from kvstore.tiers import Record
from kvstore.wire import ClientId, Generation, LeaseId, Prepared, Resident, prepare


class Disk(Protocol):
    """A device of the NVMe tier, as far as the store has to do with it. It does no I/O while it is asked."""

    @property
    def up(self) -> bool:
        """Whether it can be read and written now."""

    @property
    def page_bytes(self) -> int:
        """Of its pages."""

    @property
    def usable_pages(self) -> int:
        """Pages that objects can have, or have, when it is up."""

    @property
    def free_pages(self) -> int:
        """Pages that it can give out now; 0 while it is down."""

    @property
    def records(self) -> Mapping[Key, Record]:
        """What is stored on it."""

    @property
    def manifests(self) -> Mapping[Namespace, bytes]:
        """Of what is stored on it, and of what was opened."""

    def open_namespace(self, namespace: Namespace, manifest: bytes) -> None:
        """Makes a namespace known before objects of it are put."""

    def delete(self, record: Record) -> None:
        """The object is no more. Its pages are free some time later."""


class OnDevice(NamedTuple):
    """A copy on NVMe; it is ready from the moment that it is here."""

    disk: Disk
    record: Record


class Copy(msgspec.Struct, eq=False, gc=False):  # in no cycle: the collector need not look at it
    """A copy in DRAM."""

    extents: Extents
    state: State = State.FILLING

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


class Job:
    """A copy on its way from one tier to the other. It pins its object; `extents` are those in DRAM."""

    __slots__ = ("began_s", "extents", "object")

    def __init__(self, moved: "Object", extents: Extents, began_s: float) -> None:
        self.object = moved
        self.extents = extents
        self.began_s = began_s


class Spill(Job):
    """From DRAM to NVMe. `leaving`: the copy in DRAM is given up afterwards, unless it was used meanwhile."""

    __slots__ = ("leaving",)

    def __init__(self, moved: "Object", extents: Extents, began_s: float, *, leaving: bool) -> None:
        super().__init__(moved, extents, began_s)
        self.leaving = leaving


class Promotion(Job):
    """From NVMe, where `source` is, to DRAM."""

    __slots__ = ("source",)

    def __init__(self, moved: "Object", extents: Extents, began_s: float, source: OnDevice) -> None:
        super().__init__(moved, extents, began_s)
        self.source = source


class Object:
    """The runs of one chunk, in the tiers that have a copy."""

    __slots__ = (
        "checks",
        "cold",
        "depth",
        "dram",
        "entry",
        "failed_s",
        "failure",
        "generation",
        "job",
        "key",
        "leased_on_disk",
        "leases",
        "listed",
        "namespace",
        "nvme",
        "pages",
        "parent",
        "promoted_for",
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
        self.namespace = namespace
        self.size_bytes = size_bytes
        self.pages = namespace.pages_of(size_bytes)  # in DRAM
        self.generation = Generation(b"")
        self.table = b""
        self.resident: Prepared | None = None  # what readers are told, sealed; while it can be read in DRAM
        self.dram: Copy | None = None
        self.nvme: OnDevice | None = None
        self.job: Job | None = None
        self.failure: MissReason | None = None  # of the last promotion, if it failed
        self.failed_s = 0.0
        self.listed = True
        self.reservation: Reservation | None = None
        self.leases = 0  # how many leases have it
        self.promoted_for: Client | None = None  # who leases it, and had it promoted
        self.leased_on_disk = False  # whether it counts as leased on NVMe
        self.checks = 0  # how many verifications read it
        self.ready_s = 0.0  # when it was committed
        self.writer = ClientId(b"")
        self.reader: ClientId | None = None  # the first client to use it that did not write it
        self.shared = False  # whether there was another one
        self.cold = False

    @property
    def parent_entry(self) -> Hashable:
        """The parent's name in the policy."""
        return (self.depth - 1, self.parent)

    @property
    def in_dram(self) -> Copy:
        """Its copy in DRAM, where there must be one."""
        assert self.dram is not None, "it has no copy in DRAM"
        return self.dram

    @property
    def pinned(self) -> bool:
        """Whether none of its pages may be given to others."""
        return self.leases > 0 or self.checks > 0 or self.reservation is not None or self.job is not None

    @property
    def is_readable(self) -> bool:
        """Whether its copy in DRAM may be promised and read."""
        return self.dram is not None and self.dram.state in (State.READY, State.MOVING)

    def readable_from_now_on(self, table: bytes) -> None:
        """Its copy in DRAM is full, and has this table."""
        self.table = table
        self.resident = prepare(self.told(seal(table)))

    def told(self, proof: bytes) -> Resident:
        """What its readers are told of its copy in DRAM, with its table or seal."""
        return Resident(self.generation, self.in_dram.extents, self.size_bytes, proof)

    @property
    def is_on_disk(self) -> bool:
        """Whether there is a copy on a device that is up."""
        return self.nvme is not None and self.nvme.disk.up

    @property
    def is_unreachable(self) -> bool:
        """Whether its only copy is on a device that is down."""
        return self.dram is None and self.nvme is not None and not self.nvme.disk.up

    @property
    def tiers(self) -> dict[Tier, str]:
        """Where its copies are, and their states, in words."""
        states = {} if self.dram is None else {Tier.DRAM: self.dram.state.value}
        if self.nvme is not None:
            states[Tier.NVME] = State.READY.value if self.nvme.disk.up else "down"
        return states

    def heir(self) -> "Object":
        """The same object anew, without copies and leases."""
        heir = Object(self.key, self.parent, self.depth, self.namespace, self.size_bytes)
        heir.generation = self.generation
        heir.ready_s = self.ready_s
        heir.writer, heir.reader, heir.shared, heir.cold = self.writer, self.reader, self.shared, self.cold
        return heir

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

    @property
    def is_consumed(self) -> bool:
        """Whether its one reader had it, and said that nobody will want it again."""
        return self.cold and self.reader is not None

    def __repr__(self) -> str:
        states = ", ".join(f"{tier}: {state}" for tier, state in self.tiers.items())
        return f"<Object {self.key.hex()[:8]} {self.size_bytes} B {states}, {self.leases} leases>"
