"""A worker half with real tensors, a real mover and an in-process node; steps as vLLM's model runner makes them."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, ClassVar

from connector.metadata import (
    Coming,
    Jobs,
    LoadJob,
    LoadMore,
    LoadObject,
    LoadReport,
    Rank,
    SaveJob,
    SaveObject,
    SaveReport,
    Shape,
)
from connector.worker import WorkerHalf
from kvstore.client import Mover, NodeAddress, Staging
from kvstore.core import Extent, Extents, Geometry, Key, Span, checksums, locate, pages_for
from kvstore.transfer import InProcessNetwork, InProcessTransfer
from kvstore.wire import BootId, NodeId
from tests.connector.caches import Engine, full_spec, make_engine, vllm_config
from tests.support import wait_until

PAGE_BYTES = 4096
LAYERS, HEADS, BLOCK_TOKENS = 2, 3, 32


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """An arena of a node, and where objects lie in it: pages from both ends by turns, so that none is whole."""

    def __init__(self, network: InProcessNetwork, name: str, pages: int = 256) -> None:
        self.memory = ctypes.create_string_buffer(pages * PAGE_BYTES)
        self.base = ctypes.addressof(self.memory)
        self.transfer = InProcessTransfer(network, name)
        self.transfer.register(self.base, pages * PAGE_BYTES)
        self.address = NodeAddress(
            NodeId(name.encode().ljust(8)),
            BootId(b"boot0001"),
            "nowhere:1",
            {"in_process": name},
            self.base,
            PAGE_BYTES,
        )
        self._low, self._high = count(0, 2), count(pages - 1, -2)

    def grant(self, size_bytes: int) -> Extents:
        """Pages for an object, no two of them adjacent."""
        numbers = [next(self._low if n % 2 else self._high) for n in range(pages_for(size_bytes, PAGE_BYTES))]
        return tuple(Extent(number, 1) for number in numbers)

    def read(self, extents: Extents, size_bytes: int) -> bytes:
        """The object in these pages."""
        placed = locate(extents, PAGE_BYTES, (Span(0, size_bytes),))
        return b"".join(ctypes.string_at(self.base + offset, size) for offset, size in placed)

    def put(self, data: bytes) -> Extents:
        """Writes an object, as some writer did before."""
        extents, at = self.grant(len(data)), 0
        for offset, size in locate(extents, PAGE_BYTES, (Span(0, len(data)),)):
            ctypes.memmove(self.base + offset, data[at : at + size], size)
            at += size
        return extents

    def flip(self, extents: Extents, offset: int) -> None:
        """A bit flips in this object."""
        [(at, _)] = locate(extents, PAGE_BYTES, (Span(offset, 1),))
        ctypes.c_ubyte.from_address(self.base + at).value ^= 0x10


@dataclass
class Step:
    """What one step of the engine reported."""

    finished: set[str]
    failed: set[str]
    sent: set[str]
    invalid: set[int]
    loads: dict[int, list[LoadReport]]
    saves: dict[int, list[SaveReport]]
    read: dict[int, dict[Rank, int]] = field(default_factory=dict)


@dataclass
class Rig:
    """One engine, one worker half, and everything that it ever reported."""

    nodes: Sequence[str] = ("one", "two")
    engine: Engine = field(
        default_factory=lambda: make_engine([full_spec(BLOCK_TOKENS, HEADS, 16)] * LAYERS, 64)
    )
    alive: ClassVar[list["Rig"]] = []
    wrap: Callable[[Mover], Any] = lambda mover: mover
    clock: Clock = field(default_factory=Clock)
    half: type[WorkerHalf] = WorkerHalf

    def __post_init__(self) -> None:
        self.network = InProcessNetwork()
        self.node = {name: Node(self.network, name) for name in self.nodes}
        self.transfer = InProcessTransfer(self.network, "worker")
        self.mover = Mover(self.transfer, Staging(self.transfer, 1 << 20))
        self.worker = self.half(
            lambda: self.wrap(self.mover), vllm_config(), self.engine.config, clock=self.clock
        )
        self.worker.register_kv_caches(self.engine.tensors)
        self.steps: list[Step] = []
        self.alive.append(self)
        self._jobs = count(1)

    @property
    def geometry(self) -> Geometry:
        """The shape of this engine's objects."""
        return self.engine.understood().geometry

    @property
    def shape(self) -> Shape:
        """The same, as jobs have it."""
        return Shape(self.geometry, (0, self.geometry.num_layers), 1)

    # --- jobs -----------------------------------------------------------------------------------------

    def stored(self, data: bytes, blocks: Sequence[int | None], node: int = 0) -> LoadObject:
        """An object that is stored on a node, to be loaded into these blocks."""
        home = self.node[self.nodes[node]]
        table = checksums(memoryview(data), self.geometry.runs(len(data)))
        return LoadObject(Key(bytes(32)), node, b"g" * 8, home.put(data), len(data), table, tuple(blocks))

    def load_job(self, objects: Sequence[LoadObject], request: str = "r", deadline_s: float = 5.0) -> LoadJob:
        """A load of these objects."""
        nodes = tuple(self.node[name].address for name in self.nodes)
        return LoadJob(next(self._jobs), request, nodes, tuple(objects), deadline_s)

    def save_job(self, blocks: Sequence[Sequence[int]], deadline_s: float = 5.0) -> SaveJob:
        """A save of these blocks, one object each, to the first node."""
        node = self.node[self.nodes[0]]
        objects = []
        for some in blocks:
            size = self.geometry.object_bytes(len(some) * BLOCK_TOKENS)
            objects.append(SaveObject(Key(bytes(32)), b"g" * 8, node.grant(size), size, tuple(some)))
        return SaveJob(next(self._jobs), node.address, tuple(objects), deadline_s)

    # --- steps ----------------------------------------------------------------------------------------

    def step(
        self,
        *jobs: LoadJob | LoadMore | SaveJob,
        finished: frozenset[str] = frozenset(),
        coming: Sequence[Coming] = (),
        forward: Callable[[], object] = lambda: None,
    ) -> Step:
        """One step, its hooks in vLLM's order."""
        given = Jobs(
            [job for job in jobs if isinstance(job, LoadJob)],
            [job for job in jobs if isinstance(job, SaveJob)],
            self.shape,
            [job for job in jobs if isinstance(job, LoadMore)],
            list(coming),
        )
        self.worker.begin_saves(given)  # handle_preemptions
        self.worker.start_load_kv(given)
        forward()
        self.worker.begin_saves(given)  # wait_for_save
        results = self.worker.get_transfer_results(set(finished))
        invalid = self.worker.get_block_ids_with_load_errors()
        reports = self.worker.build_connector_worker_meta()
        step = Step(
            results.finished_recving,
            results.failed_recving,
            results.finished_sending,
            invalid,
            {job: list(ranks.values()) for job, ranks in reports.loads.items()} if reports else {},
            {job: list(ranks.values()) for job, ranks in reports.saves.items()} if reports else {},
            reports.read if reports else {},
        )
        self.steps.append(step)
        return step

    def run(self, *jobs: LoadJob | SaveJob) -> Step:
        """Steps until all of these jobs are reported, and a few more; everything reported, merged. No job may be
        reported twice."""
        self.step(*jobs)
        wanted = {job.job for job in jobs}
        wait_until(lambda: wanted <= self.reported(self.step()))
        for _ in range(3):
            self.step()
        return self.everything()

    def reported(self, _: Step | None = None) -> set[int]:
        """The jobs reported so far."""
        return {job for step in self.steps for job in (*step.loads, *step.saves)}

    def everything(self) -> Step:
        """All steps as one."""
        loads: dict[int, list[LoadReport]] = {}
        saves: dict[int, list[SaveReport]] = {}
        finished: list[str] = []
        for step in self.steps:
            finished += step.finished
            for job, reports in step.loads.items():
                loads.setdefault(job, []).extend(reports)
            for job, pushed in step.saves.items():
                saves.setdefault(job, []).extend(pushed)
        assert len(finished) == len(set(finished)), f"a request finished twice: {finished}"
        assert all(len(reports) == 1 for reports in loads.values()), "a load was reported twice"
        assert all(len(reports) == 1 for reports in saves.values()), "a save was reported twice"
        assert len(finished) == len(loads), "a load is reported together with its request"
        return Step(
            set(finished),
            set().union(*(step.failed for step in self.steps)),
            set().union(*(step.sent for step in self.steps)),
            set().union(*(step.invalid for step in self.steps)),
            loads,
            saves,
        )

    def load_report(self) -> LoadReport:
        """The report of the only load."""
        [[report]] = self.everything().loads.values()
        return report

    def save_report(self) -> SaveReport:
        """The report of the only save."""
        [[report]] = self.everything().saves.values()
        return report

    def random_objects(self, count: int, num_blocks: int = 2, seed: int = 7) -> list[bytes]:
        """Objects of two layers, as another engine would have pushed them."""
        other = other_engine(seed)
        return [other.bytes_of(range(1 + n * num_blocks, 1 + (n + 1) * num_blocks)) for n in range(count)]


@cache
def other_engine(seed: int) -> Engine:
    """An engine with other bytes; nobody writes to it."""
    return make_engine([full_spec(BLOCK_TOKENS, HEADS, 16)] * LAYERS, 64, seed=seed)
