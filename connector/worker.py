"""The worker half: moves the bytes that the scheduler half has arranged for, and says what became of it.

    hook (engine's thread)           pool (a few threads)                 hook, a later step
    start_load_kv      -- queue -->  read, verify, scatter  -- ended -->  get_transfer_results
    handle_preemptions -- queue -->  gather, hash, write    -- ended -->  build_connector_worker_meta

Saves are queued before the forward pass of the step that brings them: their blocks were computed by earlier
steps, so they move while the engine computes. (vLLM calls that hook in every step, whatever its name says.)

The engine's thread never waits: hooks only queue work and collect what has ended. Every job is reported
exactly once, whatever happens to it: a job is in `_loads` or `_saves` until it is reported, everything about
it changes under one lock, and a step's hooks report from one snapshot, so that a request never appears as
finished before its invalid blocks do. Deadlines need no thread of their own, because the engine asks every
step: what is over its deadline then is reported then.

A rank reads and writes its part of every object (`Shape.part`); where another writes its heads, it reports at once.

Engine blocks are written from verified bytes only, and never after the report: `_write` asks under the lock
for leave to scatter, no leave is given once a job is over, and a job with a scatter under way is not over.
Objects from the first bad one on are reported with all their blocks, also those that came in order later.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Condition
from typing import Any

from connector.books import Ended, Lines, Load, Save, nothing_saved
from connector.compat import KVConnectorTransferResults, logger
from connector.copies import Fence
from connector.kind_caches import ModelCaches, understand
from connector.metadata import (
    Handshake,
    Jobs,
    LoadJob,
    LoadMore,
    LoadObject,
    Rank,
    Reports,
    SaveJob,
    SaveObject,
    SaveReport,
    Shape,
)
from connector.pool import Pool
from connector.shape import LayoutUnsupported
from connector.tensors import KVCaches
from kvstore.client import Mover, PullItem, PushItem
from kvstore.core import KVStoreError, MissReason, Part, TransferFailed

log = logger(__name__)

THREADS = 4
GRACE_S = 0.25  # behind the deadline, for the mover's own answer, which knows more
COPIES_S = 5.0  # for scatters and gathers under way, when vLLM wants its blocks back
_ASLEEP = "the engine sleeps"


class WorkerHalf:
    """The connector of one worker.

    Args:
        open_mover: makes the mover, once the tensors are known. What it raises (`KVStoreError`, `ImportError`
            or `OSError`) is one line in the log, and this engine does without the store.
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's description of the KV cache.
        rank: this worker's place in the engine.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        open_mover: Callable[[], Mover],
        vllm_config: Any,
        kv_cache_config: Any,
        rank: Rank = Rank(),  # noqa: B008 - immutable
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._shape: Shape | None = None
        self._open_mover = open_mover
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._clock = clock
        self._unsupported = "vLLM has registered no KV cache"
        self._caches: KVCaches | ModelCaches | None = None
        self._mover: Mover | None = None
        self._pool: Pool | None = None
        self._changed = Condition()
        self._loads: dict[int, Load] = {}
        self._saves: dict[int, Save] = {}
        self._next_save = 0  # jobs are numbered in the order in which they come: those before were queued
        self._ended = Ended()
        self._reporting = Ended()  # the snapshot of this step
        self._lines = Lines(clock)
        self._touching = 0  # scatters and gathers under way
        self._unmapped = False
        self._closed = False

    # --- start and end --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Understands the tensors and opens the way to nodes. What cannot be is one line; the engine goes on."""
        try:
            self._caches = understand(kv_caches, self._kv_cache_config, self._vllm_config)
            self._mover = self._open_mover()
        except LayoutUnsupported as error:
            self._unsupported = str(error)
        except (KVStoreError, ImportError, OSError) as error:
            self._unsupported = f"bytes cannot be moved: {error}"
        else:
            self._unsupported = ""
            self._pool = Pool(THREADS, "kvstore-transfer")
            return
        log.warning("KV of this engine is neither saved to nor loaded from the store: %s", self._unsupported)

    def get_handshake_metadata(self) -> Handshake:
        """What the scheduler half must know of the tensors, or why it should not count on this worker."""
        if self._unsupported:
            return Handshake(unsupported=self._unsupported)
        assert self._caches is not None
        return self._caches.handshake

    def shutdown(self) -> None:
        """Begins nothing and reports nothing any more, and touches no block from now on."""
        with self._changed:
            self._closed = True
            self._loads.clear()
            self._saves.clear()
            self._ended = self._reporting = Ended()
        self._wait_for_copies()
        if self._pool is not None:
            self._pool.close()

    def leave_blocks(self) -> None:
        """Ends what is under way, and touches no block until `return_to_blocks`: vLLM puts the engine to sleep."""
        with self._changed:
            self._unmapped = True
            for load in list(self._loads.values()):
                load.lose(load.valid, None, _ASLEEP)
                self._settle(load)
            for save in list(self._saves.values()):
                self._report(save, nothing_saved(save.job, quiet=not save.began_writing))
        self._wait_for_copies()

    def return_to_blocks(self) -> None:
        """The blocks are there again, at the same addresses."""
        with self._changed:
            self._unmapped = False

    def _wait_for_copies(self) -> None:
        """For scatters and gathers under way: vLLM is about to unmap the blocks."""
        with self._changed:
            quiet = self._changed.wait_for(lambda: self._touching == 0, COPIES_S)
        if not quiet:
            log.error("a copy of KV blocks did not end within %.0f s of being asked to", COPIES_S)

    # --- hooks of a step ------------------------------------------------------------------------------

    def start_load_kv(self, jobs: Jobs) -> None:
        """Queues this step's loads, and what has become known of those under way."""
        for more in jobs.more:
            self._go_on(more)
        if not jobs.loads:
            return
        self._shape = jobs.shape or self._shape
        after = self._caches.fence() if self._caches is not None else None
        for job in jobs.loads:
            self._begin_load(job, after)

    def begin_saves(self, jobs: Jobs) -> None:
        """Queues this step's saves that were not queued yet, ordered after all passes launched so far."""
        new = [job for job in jobs.saves if job.job >= self._next_save]
        if not new:
            return
        self._next_save = 1 + max(job.job for job in new)
        self._shape = jobs.shape or self._shape
        after = self._caches.fence() if self._caches is not None else None
        for job in new:
            self._begin_save(job, after)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads ended since the last step. Takes the snapshot that the other hooks report from."""
        with self._changed:
            self._give_up_late()
            ended, self._ended = self._ended, Ended()
            self._reporting.invalid |= ended.invalid
            self._reporting.reports = self._reporting.reports.aggregate(ended.reports)
        for line in ended.lines:
            log.warning("%s", line)
        return KVConnectorTransferResults(finished_recving=ended.requests, failed_recving=ended.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those requests that do not hold what was promised."""
        with self._changed:
            invalid, self._reporting.invalid = self._reporting.invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> Reports | None:
        """Reports on the jobs that ended, for the scheduler half."""
        with self._changed:
            reports, self._reporting.reports = self._reporting.reports, Reports()
        return reports or None

    def _part(self, wanted: LoadObject | SaveObject) -> Part:
        """This rank's part of an object."""
        assert self._shape is not None, "jobs come with the shape of their objects"
        return self._shape.of(wanted.kind).part(self._rank, wanted.size_bytes)

    def _say(self, kind: object, line: str) -> None:
        """Leaves a line for the log, which the next step writes. Under the lock."""
        self._ended.lines += self._lines.pick(kind, line)

    # --- loads ----------------------------------------------------------------------------------------

    def _begin_load(self, job: LoadJob, after: Fence) -> None:
        with self._changed:
            if self._closed or job.job in self._loads:
                return
            load = self._loads[job.job] = Load(job, after, self._clock())
            if self._pool is None:
                load.lose(0, MissReason.LAYOUT_UNSUPPORTED, self._unsupported)
            elif self._unmapped:
                load.lose(0, None, _ASLEEP)
            elif job.deadline_s <= 0:
                load.lose(0, None, "")  # the scheduler half knows why
            self._read(load, range(len(job.objects)))

    def _go_on(self, more: LoadMore) -> None:
        """Reads what has come from NVMe, and gives up what will not come."""
        with self._changed:
            if (load := self._loads.get(more.job)) is not None:  # else it is over
                load.go_on(more)
                self._read(load, more.places)

    def _read(self, load: Load, indices: Iterable[int]) -> None:
        """Queues the transfers of those objects that can be read, unless the load is over. Under the lock."""
        by_node = load.by_node(index for index in indices if index < load.lost_from)
        load.reading += len(by_node)
        self._settle(load)
        if self._pool is not None:
            for node, some in by_node.items():
                self._pool.load(partial(self._pull, load, node, some))

    def _pull(self, load: Load, node: int, indices: Sequence[int]) -> None:
        """Reads the objects that one node holds, in chain order, up to the first that fails."""
        try:
            items = [self._pull_item(load, index) for index in indices if not self._given_up(load, index)]
            if items:
                self._pull_items(load, node, indices, items)
        except Exception as error:  # noqa: BLE001 - a thread's body never dies without its report
            with self._changed:
                load.lose(load.first_missing(indices), None, f"internal error: {error!r}")
        finally:
            with self._changed:
                load.reading -= 1
                self._settle(load)

    def _pull_items(self, load: Load, node: int, indices: Sequence[int], items: Sequence[PullItem]) -> None:
        assert self._mover is not None
        left_s = load.began + load.job.deadline_s - self._clock()
        for at, result in self._mover.pull_each(load.job.nodes[node], items, left_s):
            if not result.ok:
                with self._changed:
                    load.failed(indices[at], result)
                return  # what is under way behind it is let go with the generator

    def _pull_item(self, load: Load, index: int) -> PullItem:
        wanted = load.objects[index]
        part, sink = self._part(wanted), partial(self._write, load, index)
        return PullItem(wanted.extents, wanted.size_bytes, part, wanted.table, sink)

    def _given_up(self, load: Load, index: int) -> bool:
        with self._changed:
            return index >= load.lost_from or self._loads.get(load.job.job) is not load

    def _write(self, load: Load, index: int, data: memoryview) -> None:
        """Scatters one verified object into the engine's blocks, unless it is too late for that."""
        with self._changed:
            if index >= load.lost_from or self._loads.get(load.job.job) is not load:
                return
            load.moved_bytes += len(data)
            load.last_read = self._clock()
            load.writing += 1
            self._touching += 1
        done = False
        try:
            assert self._caches is not None
            wanted = load.job.objects[index]
            self._caches.of(wanted.kind).scatter(data, wanted.blocks, load.after)
            done = True
        finally:
            with self._changed:
                load.ends_s[index] = self._clock() - load.began if done else None
                if load.streams:
                    self._ended.reports.read[load.job.job] = {self._rank: load.valid}
                load.writing -= 1
                self._touching -= 1
                self._settle(load)
                self._changed.notify_all()

    def _settle(self, load: Load) -> None:
        """Reports a load from which nothing more can be gained, once. Under the lock."""
        if not load.over or load.writing or self._loads.get(load.job.job) is not load:
            return
        del self._loads[load.job.job]
        self._ended.load(load, self._rank, self._clock())
        if line := load.obituary:
            self._say(load.reason, line)

    # --- saves ----------------------------------------------------------------------------------------

    def _begin_save(self, job: SaveJob, after: Fence) -> None:
        with self._changed:
            if self._closed:
                return
            assert job.job not in self._saves, f"save {job.job} was begun already"
            save = Save(job, after, self._clock())
            self._saves[job.job] = save
            if self._pool is None or self._unmapped:
                self._report(save, nothing_saved(job, quiet=True))
                return
            assert self._shape is not None, "jobs come with the shape of their objects"
            if not self._shape.of(job.objects[0].kind).writes(self._rank):
                self._report(save, SaveReport(({},) * len(job.objects), quiet=True))
                return
        self._pool.save(partial(self._push, save))

    def _push(self, save: Save) -> None:
        """Writes a job's objects into their granted pages."""
        with self._changed:
            if self._saves.get(save.job.job) is not save:
                return  # its deadline came first: nothing may be written into its pages any more
            save.began_writing = True
        report = nothing_saved(save.job, quiet=False)
        try:
            report = self._push_items(save)
        except Exception as error:  # noqa: BLE001 - a thread's body never dies without its report
            with self._changed:
                line = f"{save.job.whose}: {len(save.job.objects)} pieces could not be saved: {error!r}"
                self._say(type(error), line)
        finally:
            with self._changed:
                self._report(save, report)

    def _push_items(self, save: Save) -> SaveReport:
        assert self._mover is not None
        items = [
            PushItem(
                wanted.extents, wanted.size_bytes, self._part(wanted), partial(self._gather, save, index)
            )
            for index, wanted in enumerate(save.job.objects)
        ]
        left_s = save.began + save.job.deadline_s - self._clock()
        results = self._mover.push(save.job.node, items, left_s)
        failed = [result for result in results if not result.ok]
        if failed:
            line = f"{len(failed)} of {len(items)} pieces could not be saved: {failed[0].error}"
            line = f"{save.job.whose}: {line}"
            with self._changed:
                self._say(("save", failed[0].reason), line)
        return save.report(items, results, self._clock())

    def _gather(self, save: Save, index: int, out: memoryview) -> None:
        """Gathers one object. The blocks of a save that is over may hold anything, or be unmapped."""
        with self._changed:
            if self._saves.get(save.job.job) is not save:
                raise TransferFailed("the save is over its deadline, or the engine shuts down")
            self._touching += 1
        try:
            self._fill(save.job.objects[index], out, save.after)
        finally:
            with self._changed:
                self._touching -= 1
                self._changed.notify_all()

    def _fill(self, wanted: SaveObject, out: memoryview, after: Fence) -> None:
        assert self._caches is not None
        self._caches.of(wanted.kind).gather(wanted.blocks, out, after)

    def _report(self, save: Save, report: SaveReport) -> None:
        """Reports a save, once. Under the lock."""
        if self._saves.get(save.job.job) is save:
            del self._saves[save.job.job]
            self._ended.reports.saves[save.job.job] = {self._rank: report}

    def _give_up_late(self) -> None:
        """Ends what is over its deadline. Under the lock."""
        now = self._clock()
        for load in list(self._loads.values()):
            if now >= load.began + load.job.deadline_s + GRACE_S:
                load.out_of_time()
                self._settle(load)
        for save in list(self._saves.values()):
            if now >= save.began + save.job.deadline_s + GRACE_S:
                began = save.began_writing  # else it has only waited for others
                reason = MissReason.TOO_SLOW if began else None
                self._report(save, nothing_saved(save.job, quiet=not began, reason=reason))
