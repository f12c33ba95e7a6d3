"""What the two halves of the connector say to each other, as plain data.

Scheduler half -> worker half: `Jobs`, with every step. Worker half -> scheduler half: `Reports`, merged over
ranks by `aggregate`. Durations, never instants: both sides count with their own clock.
"""

from dataclasses import dataclass, field

from connector.compat import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata
from kvstore.client import NodeAddress
from kvstore.core import Extents, Key, MissReason


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What only a worker knows of its KV cache, told once after it was registered; it completes the manifest.

    The fields are those of `kvstore.core.Manifest`; `lanes` describes the whole model, not this rank's part.
    `unsupported` is a reason, as half a sentence, neither to save nor to load on this engine.
    """

    tile_format: str = ""
    kv_dtype: str = ""
    unit_tokens: int = 0
    lanes: tuple[tuple[int, int, int], ...] = ()
    unsupported: str | None = None


@dataclass(frozen=True, slots=True)
class LoadObject:
    """One object to pull. `blocks` has one engine block id per block of the object, in token order; None
    marks a block that must not be written (the engine has it already, or does not want it)."""

    key: Key
    node: int  # index into LoadJob.nodes
    generation: bytes
    extents: Extents
    size_bytes: int
    table: bytes
    blocks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Everything one request loads, in chain order.

    A job whose `deadline_s` is not positive moves nothing: all its blocks are reported as failed at once.
    """

    job: int
    request: str
    nodes: tuple[NodeAddress, ...]
    objects: tuple[LoadObject, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SaveObject:
    """One object to push into granted pages. `blocks` are the engine blocks of its tokens, in order."""

    key: Key
    generation: bytes
    extents: Extents
    size_bytes: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Objects of one step that go to one node."""

    job: int
    node: NodeAddress
    objects: tuple[SaveObject, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How far a load got on one rank: the first `valid` objects are loaded and verified, in full.

    `suspect` is the position of an object whose bytes did not match its table. `moved_bytes` and the
    times feed metrics.
    """

    valid: int
    reason: MissReason | None = None
    suspect: int | None = None
    moved_bytes: int = 0
    read_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Outcome per object of a save on one rank, in the job's order.

    `checksums[i]` maps run index to its 8-byte checksum for the runs this rank wrote; None: the write
    failed. `quiet` is False if any of its transfers may still land.
    """

    checksums: tuple[dict[int, bytes] | None, ...]
    quiet: bool
    moved_bytes: int = 0
    total_s: float = 0.0


@dataclass(slots=True)
class Jobs(KVConnectorMetadata):
    """One step's work for every rank."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass(slots=True)
class Reports(KVConnectorWorkerMetadata):
    """What ended on the ranks since the last step: one entry per rank that reported, by job."""

    loads: dict[int, list[LoadReport]] = field(default_factory=dict)
    saves: dict[int, list[SaveReport]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Reports":
        """Both ranks' reports together."""
        assert isinstance(other, Reports), f"reports of another connector: {type(other)}"
        merged = Reports(
            {job: list(r) for job, r in self.loads.items()}, {j: list(r) for j, r in self.saves.items()}
        )
        for job, loads in other.loads.items():
            merged.loads.setdefault(job, []).extend(loads)
        for job, saves in other.saves.items():
            merged.saves.setdefault(job, []).extend(saves)
        return merged
