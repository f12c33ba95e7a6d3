"""A worker half for every rank of a fleet, and what the scheduler half makes of their reports."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from connector.metadata import Jobs, LoadJob, LoadReport, SaveJob, SaveObject, SaveReport
from connector.worker import WorkerHalf
from kvstore.client import Mover, NodeAddress
from kvstore.core import Extents, Key, Manifest
from tests.connector.caches import vllm_config
from tests.connector.fleet import CHUNK_TOKENS, Fleet
from tests.support import wait_until


class Team:
    """An engine's workers. All of them move bytes with one mover."""

    def __init__(self, fleet: Fleet, mover: Mover) -> None:
        self.fleet = fleet
        backend = "FLASH_ATTN" if fleet.model.layers[0].heads else "FLASHMLA"
        self.workers: list[WorkerHalf] = []
        for member in fleet.members:
            config: Any = vllm_config(backend=backend)
            worker = WorkerHalf(lambda: mover, config, member.engine.config, member.rank)
            with patch("connector.worker.understand", lambda *_, caches=member.caches: caches):
                worker.register_kv_caches(member.engine.tensors)
            self.workers.append(worker)
        self._job = 0

    @property
    def manifest(self) -> Manifest:
        """Of the namespace that this engine's KV is in."""
        whole = self.fleet.whole
        geometry = whole.shape.geometry
        lanes = tuple((layers, heads, size) for layers, heads, size in geometry.lanes)
        return Manifest(
            weights="w",
            model={},
            kv_dtype=whole.kv_dtype,
            tile_format=whole.tile_format,
            chunk_tokens=CHUNK_TOKENS,
            unit_tokens=geometry.unit_tokens,
            lanes=lanes,
        )

    @property
    def size_bytes(self) -> int:
        """Of the fleet's chunk."""
        return len(self.fleet.model.object)

    def save_job(self, key: Key, node: NodeAddress, generation: bytes, extents: Extents) -> SaveJob:
        """A job that pushes the fleet's chunk."""
        self._job += 1
        wanted = SaveObject(key, generation, extents, self.size_bytes, tuple(self.fleet.table))
        return SaveJob(self._job, node, (wanted,), 20.0)

    def save_on(self, rank: int, job: SaveJob) -> SaveReport:
        """One rank does its part, from beginning to end."""
        self._begin(self.workers[rank], Jobs(saves=[job], shape=self.fleet.shape))
        return self._report(rank, "saves", job.job)

    def load_on(self, rank: int, job: LoadJob) -> LoadReport:
        """One rank does its part, from beginning to end."""
        self._begin(self.workers[rank], Jobs(loads=[job], shape=self.fleet.shape))
        return self._report(rank, "loads", job.job)

    def save(self, job: SaveJob) -> bytes | None:
        """All ranks do their parts: the table, or None if any failed."""
        return merged([self.save_on(rank, job) for rank in range(len(self.workers))])

    def load(self, job: LoadJob) -> list[LoadReport]:
        """All ranks do their parts."""
        return [self.load_on(rank, job) for rank in range(len(self.workers))]

    def _begin(self, worker: WorkerHalf, jobs: Jobs) -> None:
        worker.begin_saves(jobs)
        worker.start_load_kv(jobs)

    def _report(self, rank: int, kind: str, job: int) -> Any:
        found: list[Any] = []

        def reported() -> bool:
            self.workers[rank].get_transfer_results(set())
            self.workers[rank].get_block_ids_with_load_errors()
            reports = self.workers[rank].build_connector_worker_meta()
            for which, report in getattr(reports, kind)[job].items() if reports else ():
                assert which == self.fleet.members[rank].rank, "it reports as another rank"
                found.append(report)
            return bool(found)

        wait_until(reported, 20.0, f"rank {rank} has reported")
        [report] = found
        return report

    def close(self) -> None:
        """The engine ends."""
        for worker in self.workers:
            worker.shutdown()


def merged(reports: Sequence[SaveReport]) -> bytes | None:
    """The table of the only object, from what all ranks have written."""
    runs: dict[int, bytes] = {}
    for report in reports:
        [sums] = report.checksums
        if sums is None:
            return None
        assert runs.keys().isdisjoint(sums)
        runs |= sums
    return b"".join(runs[index] for index in range(len(runs)))


@contextmanager
def team(fleet: Fleet, mover: Mover) -> Iterator[Team]:
    """A team that goes with the test."""
    made = Team(fleet, mover)
    try:
        yield made
    finally:
        made.close()
