"""What the two halves of the connector say to each other, as plain data.

Scheduler half -> worker half: `Jobs`, with every step. Worker half -> scheduler half: `Reports`, merged over
ranks by `aggregate`. Durations, never instants: both sides count with their own clock.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from connector.compat import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata
from kvstore.client import NodeAddress
from kvstore.core import Extents, Geometry, Key, MissReason, Part


class Rank(NamedTuple):
    """A worker's place in its engine: pipeline stage, and place in the stage's tensor parallel group."""

    pp: int = 0
    tp: int = 0


class Layer(NamedTuple):
    """One layer's KV on one rank: its global name, the heads there, bytes of one unit of tokens of one head."""

    name: str
    num_heads: int
    unit_bytes: int


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What only a worker knows of its part of the KV cache, told once after it was registered.

    All ranks' handshakes together complete the manifest (`connector.shape`), whose words `tile_format`,
    `kv_dtype` and `unit_tokens` are. `layers` are in the order of their names: those of the full kind; `kinds` says
    the same of the others (`connector.kinds`). `unsupported` is a reason, as half a sentence, neither to save nor to
    load on this engine.
    """

    tile_format: str = ""
    kv_dtype: str = ""
    unit_tokens: int = 0
    layers: tuple[Layer, ...] = ()
    unsupported: str | None = None
    kinds: tuple["Handshake", ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the engine's objects, and how its ranks divide them.

    Args:
        geometry: of the whole model.
        firsts: number of the first layer of every pipeline stage, and at the end the number of layers.
        tp_size: ranks of a stage.
        kinds: the shapes of the objects of other kinds than the full one.
    """

    geometry: Geometry
    firsts: tuple[int, ...]
    tp_size: int
    kinds: tuple["Shape", ...] = ()

    def of(self, kind: int) -> "Shape":
        """The shape of the objects of this kind; 0 is the full one."""
        return self.kinds[kind - 1] if kind else self

    def part(self, rank: Rank, size_bytes: int) -> Part:
        """The rank's part of an object of this size: what it reads, and what it writes if it is a writer."""
        units = self.geometry.units_of(size_bytes)
        assert units is not None, f"no object of this namespace has {size_bytes} bytes"
        layers = range(self.firsts[rank.pp], self.firsts[rank.pp + 1])
        return self.geometry.part(units * self.geometry.unit_tokens, layers, rank.tp, self.tp_size)

    def writes(self, rank: Rank) -> bool:
        """Whether the rank is the one that writes the heads it holds: the first of those that do."""
        replicas = max(1, self.tp_size // self.geometry.lanes[0].num_heads)
        return rank.tp % replicas == 0

    def largest_part_bytes(self, num_tokens: int) -> int:
        """Bytes of the largest part of an object of so many tokens."""
        size = self.geometry.object_bytes(num_tokens)
        return max(self.part(Rank(pp), size).size_bytes for pp in range(len(self.firsts) - 1))


@dataclass(frozen=True, slots=True)
class LoadObject:
    """One object to pull. `blocks` has one engine block id per block of the object, in token order; None
    marks a block that must not be written (the engine has it already, or does not want it). Where the layers of the
    object's `kind` are in several groups of vLLM, those of each group follow each other. `placed` is False while it
    is on its way from NVMe: where it is comes in a `LoadMore`."""

    key: Key
    node: int  # index into LoadJob.nodes
    generation: bytes
    extents: Extents
    size_bytes: int
    table: bytes
    blocks: tuple[int | None, ...]
    placed: bool = True
    kind: int = 0


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Everything one request loads, in chain order.

    A job whose `deadline_s` is not positive moves nothing: all its blocks are reported as failed at once.
    `all_or_nothing`: of no use in part. If it fails, the request is reported instead of blocks.
    """

    job: int
    request: str
    nodes: tuple[NodeAddress, ...]
    objects: tuple[LoadObject, ...]
    deadline_s: float
    all_or_nothing: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is that was not placed when its job was made."""

    generation: bytes
    extents: Extents
    table: bytes


@dataclass(frozen=True, slots=True)
class LoadMore:
    """More of a load job that is under way: places by position, or where it ends early, and why."""

    job: int
    places: dict[int, Place]
    lost_from: int | None = None
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class SaveObject:
    """One object to push into granted pages. `blocks` are the engine blocks of its tokens, in order; `request` is
    for the log; `offer` says under which number it was `Coming`, if it was."""

    key: Key
    generation: bytes
    extents: Extents
    size_bytes: int
    blocks: tuple[int, ...]
    request: str = ""
    kind: int = 0
    offer: int = 0


@dataclass(frozen=True, slots=True)
class Coming:
    """Blocks that this step completes, and the number of the offer: a later save may name it."""

    offer: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Objects of one kind and one step that go to one node."""

    job: int
    node: NodeAddress
    objects: tuple[SaveObject, ...]
    deadline_s: float

    @property
    def whose(self) -> str:
        """Its requests, for the log; of many a few."""
        names = list(dict.fromkeys(wanted.request for wanted in self.objects))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"request{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How far a load got on one rank: the first `valid` objects are loaded and verified, in full.

    `suspect` is the position of an object whose bytes did not match its table. `moved_bytes` and the
    times feed metrics; `ends_s` says of each valid object when it was there, counted from the job's beginning.
    """

    valid: int
    reason: MissReason | None = None
    suspect: int | None = None
    moved_bytes: int = 0
    read_s: float = 0.0
    total_s: float = 0.0
    ends_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Outcome per object of a save on one rank, in the job's order.

    `checksums[i]` maps run index to its 8-byte checksum for the runs this rank wrote, none where another rank
    writes the heads that it holds; None: the write failed, for `reason` as far as it is known. `quiet` is False if
    any of its transfers may still land.
    """

    checksums: tuple[dict[int, bytes] | None, ...]
    quiet: bool
    moved_bytes: int = 0
    total_s: float = 0.0
    reason: MissReason | None = None


@dataclass(slots=True)
class Jobs(KVConnectorMetadata):
    """One step's work for every rank. Every rank finds its parts of the objects by `shape`."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    shape: Shape | None = None
    more: list[LoadMore] = field(default_factory=list)
    coming: list[Coming] = field(default_factory=list)


@dataclass(slots=True)
class Reports(KVConnectorWorkerMetadata):
    """What ended on the ranks since the last step: of each job, the reports by rank. A rank has one, the first.

    `read` is how many objects of a job that is not over have been read so far, by rank: of jobs with objects from
    NVMe alone.
    """

    loads: dict[int, dict[Rank, LoadReport]] = field(default_factory=dict)
    saves: dict[int, dict[Rank, SaveReport]] = field(default_factory=dict)
    read: dict[int, dict[Rank, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.read)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Reports":
        """Both ranks' reports together."""
        assert isinstance(other, Reports), f"reports of another connector: {type(other)}"
        merged = Reports(
            {job: dict(r) for job, r in self.loads.items()},
            {job: dict(r) for job, r in self.saves.items()},
            {job: dict(r) for job, r in self.read.items()},
        )
        for job, loads in other.loads.items():
            merged.loads[job] = loads | merged.loads.get(job, {})
        for job, saves in other.saves.items():
            merged.saves[job] = saves | merged.saves.get(job, {})
        for job, read in other.read.items():
            merged.read.setdefault(job, {}).update(read)
        return merged
