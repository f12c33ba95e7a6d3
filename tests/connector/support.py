"""A real vLLM scheduler with the connector in it, a fake model and worker, and an in-memory store.

The fake model has a KV cache whose content can be checked: the KV of a token is a digest of the prompt up to
it. Each step verifies, for every scheduled request, all positions that attention would read, and then writes
those of its new tokens. So whatever goes wrong with blocks, references, loads or saves, a wrong token shows.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.config import Config
from connector.control import (
    Arrival,
    Control,
    Found,
    Grant,
    NotGranted,
    Promise,
    Promised,
    ReportLine,
    ReserveAsk,
)
from connector.guard import Breaker
from connector.metadata import (
    Handshake,
    Jobs,
    Layer,
    LoadJob,
    LoadMore,
    LoadReport,
    Rank,
    Reports,
    SaveJob,
    SaveReport,
)
from connector.scheduler import SchedulerHalf
from kvstore.client import NodeAddress, NodeId
from kvstore.core import Key, Manifest, MissReason, PeerLost, Tier, seal
from kvstore.wire import BootId
from tests.conftest import MODEL

BLOCK = 16
CHUNK = 64
LAYERS = (Layer("layers.0", 1, 16), Layer("layers.1", 1, 16))  # two runs per object
HANDSHAKE = Handshake("test", "float32", BLOCK, LAYERS)
STAGES = {(pp, 0): Handshake("test", "float32", BLOCK, LAYERS[pp : pp + 1]) for pp in range(2)}  # a run each
RUNS = 2

Content = tuple[bytes | None, ...]  # the KV of consecutive tokens


def table_of(content: Content) -> list[bytes]:
    """The checksums of the two runs of an object."""
    whole = repr(content).encode()
    return [hashlib.sha256(bytes([run]) + whole).digest()[:8] for run in range(RUNS)]


# --- the store ----------------------------------------------------------------------------------------


@dataclass
class Stored:
    """A committed object."""

    generation: bytes
    table: bytes
    size_bytes: int
    cold: bool


@dataclass(repr=False)
class Node:
    """One node's memory, shared by the engines of a test. `pages` is what was written, by generation.

    Of `on_disk`, at most `room` objects are in DRAM at a time, until they are released.
    """

    number: int = 1
    boot: int = 1
    down: bool = False
    refuse: MissReason | None = None
    objects: dict[Key, Stored] = field(default_factory=dict)
    pages: dict[bytes, Content] = field(default_factory=dict)
    reserved: dict[Key, bytes] = field(default_factory=dict)
    leases: dict[int, list[Key]] = field(default_factory=dict)
    on_disk: set[Key] = field(default_factory=set)
    in_dram: set[Key] = field(default_factory=set)  # of those on disk
    room: int = 1_000  # for those
    eta_s: float = 0.01
    disk_faults: dict[Key, MissReason] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    parked: "list[Callable[[], None]]" = field(default_factory=list)
    generations: Any = field(default_factory=lambda: count(1))

    @property
    def address(self) -> NodeAddress:
        node, boot = NodeId(self.number.to_bytes(8, "big")), BootId(self.boot.to_bytes(8, "big"))
        return NodeAddress(node, boot, "test:1", {}, 0, 1 << 20)

    def __repr__(self) -> str:
        held = f"{len(self.leases)} leases, {len(self.reserved)} reserved, {len(self.parked)} parked"
        return f"<Node {len(self.objects)} objects, {held}>"

    def wake(self) -> None:
        """Looks at parked acquires again."""
        parked, self.parked = self.parked, []
        for look in parked:
            look()

    @property
    def is_quiet(self) -> bool:
        """Nothing is leased, reserved or parked."""
        return not self.leases and not self.reserved and not self.parked


class FakeControl:
    """Keeps the contract of `connector.control.Control` on a `Node`. With `manual`, answers wait for `answer()`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.manual = False
        self.index_down = False
        self.clock = lambda: 0.0
        self.lease_s = 30.0  # what renewing brings
        self.lines: list[ReportLine] = []
        self.suspects: list[Key] = []
        self.manifests: list[Manifest] = []
        self.abandoned = 0
        self.closed = False
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._leases = count(1)

    def answer(self, number: int | None = None) -> None:
        """Answers the questions asked so far (or the first `number`)."""
        for _ in range(len(self._queue) if number is None else number):
            future, work = self._queue.popleft()
            self._work(future, work)

    def _later(self, name: str, work: Callable[[], Any]) -> "Future[Any]":
        self.node.calls.append(name)
        future: Future[Any] = Future()
        if self.manual:
            self._queue.append((future, work))
        else:
            self._work(future, work)
        return future

    def _work(self, future: "Future[Any]", work: Callable[[], Any]) -> None:
        if future.cancelled():
            return
        if self.node.down:
            future.set_exception(PeerLost("the node is down"))
            return
        answer = work()
        if answer is not None:
            future.set_result(answer)
        else:
            self.node.parked.append(lambda: self._work(future, work))

    def open(self, manifest: Manifest) -> None:
        self.manifests.append(manifest)

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future

    def lookup(self, keys: Sequence[Key], *, prefetch: bool = False) -> "Future[Found]":
        def work() -> Found:
            if self.index_down:
                return Found(0, MissReason.INDEX_DOWN)
            found = self._prefix(keys)
            return Found(found, None if found == len(keys) else MissReason.NEVER_STORED)

        return self._later("lookup", work)

    def present(self, keys: Sequence[Key]) -> "Future[Sequence[bool] | None]":
        if not self.index_down:
            return self._later("present", lambda: [key in self.node.objects for key in keys])
        nobody: Future[Sequence[bool] | None] = Future()
        nobody.set_result(None)
        return nobody

    def _prefix(self, keys: Sequence[Key]) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.node.objects), len(keys))

    def acquire(
        self, keys: Sequence[Key], duration_s: float, wait_s: float, nodes: Sequence[str]
    ) -> "Future[Promise]":
        end = self.clock() + wait_s

        def work() -> Promise | None:
            found = self._prefix(keys)
            if found < len(keys) and self.clock() < end:
                return None
            lease = next(self._leases) + 1_000_000 * id(self)
            if found:
                self.node.leases[lease] = list(keys[:found])
            return Promise(
                tuple(self._promised(key) for key in keys[:found]),
                None if found == len(keys) else MissReason.NEVER_STORED,
                lease,
            )

        return self._later("acquire", work)

    def _promised(self, key: Key) -> Promised:
        stored = self.node.objects[key]
        if key in self.node.on_disk - self.node.in_dram:
            eta_s = self.node.eta_s
            return Promised(key, self.node.address, b"on disk.", (), stored.size_bytes, b"", Tier.NVME, eta_s)
        return Promised(key, self.node.address, stored.generation, (), stored.size_bytes, stored.table)

    def promote(self, promise: Promise, timeout_s: float) -> "FakeArrivals":
        self.node.calls.append("promote")
        return FakeArrivals(self, promise, self.clock() + timeout_s)

    def shorten(self, promise: Promise, keys: Collection[Key], *, cold: bool = False) -> Promise:
        self.node.calls.append("shorten cold" if cold else "shorten")
        for key in keys:
            self.node.leases[promise.handle].remove(key)
        self.node.in_dram -= set(keys)
        left = tuple(one for one in promise.objects if one.key not in keys)
        return replace(promise, objects=left)

    def abandon(self, future: "Future[Promise]") -> None:
        self.abandoned += 1
        if not future.cancel() and future.exception() is None:
            self.release(future.result())

    def renew(self, promise: Promise, duration_s: float) -> "Future[float]":
        return self._later("renew", lambda: self.lease_s if promise.handle in self.node.leases else 0.0)

    def release(self, promise: Promise, *, cold: bool = False) -> None:
        self.node.calls.append("release cold" if cold else "release")
        self.node.in_dram -= set(self.node.leases.pop(promise.handle, ()))

    def suspect(self, promise: Promise, promised: Promised, request: str) -> None:
        assert promised.key in self.node.leases[promise.handle], "a suspect must still be leased"
        assert promised.generation == self.node.objects[promised.key].generation, "of the copy that was read"
        self.suspects.append(promised.key)

    def reserve(
        self, items: Sequence[ReserveAsk], duration_s: float
    ) -> "Future[Sequence[Grant | NotGranted]]":
        return self._later("reserve", lambda: [self._reserve(item) for item in items])

    def _reserve(self, item: ReserveAsk) -> Grant | NotGranted:
        if item.key in self.node.objects:
            return NotGranted(stored=True, node=self.node.address)
        if item.key in self.node.reserved or self.node.refuse is not None:
            return NotGranted(stored=False, reason=self.node.refuse)
        generation = next(self.node.generations).to_bytes(8, "big")
        self.node.reserved[item.key] = generation
        return Grant(self.node.address, generation, (), item)

    def commit(self, items: Sequence[tuple[Grant, bytes]]) -> "Future[Sequence[bool]]":
        def work() -> list[bool]:
            answers = [self._commit(grant, table) for grant, table in items]
            self.node.wake()
            return answers

        return self._later("commit", work)

    def _commit(self, grant: Grant, table: bytes) -> bool:
        ask = grant.handle
        if self.node.reserved.get(ask.key) != grant.generation:
            return False
        del self.node.reserved[ask.key]
        assert table == b"".join(table_of(self.node.pages[grant.generation])), "a table of other bytes"
        self.node.objects[ask.key] = Stored(grant.generation, table, ask.size_bytes, ask.cold)
        return True

    def abort(self, grants: Sequence[Grant], *, quiet: bool) -> None:
        self.node.calls.append(f"abort quiet={quiet}")
        for grant in grants:
            self.node.reserved.pop(grant.handle.key, None)

    def report(self, lines: Sequence[ReportLine]) -> None:
        self.lines.extend(lines)

    def take_timings(self) -> list[tuple[str, float]]:
        return []

    def close(self) -> None:
        self.closed = True


class FakeArrivals:
    """Keeps the contract of `connector.control.Arrivals`: in order, as far as the node has room."""

    def __init__(self, control: FakeControl, promise: Promise, end: float) -> None:
        self.control, self.promise, self.end = control, promise, end
        self.waiting = [n for n, one in enumerate(promise.objects) if one.tier is Tier.NVME]

    @property
    def done(self) -> bool:
        return not self.waiting

    def take(self) -> list[Arrival]:
        node = self.control.node
        came: list[Arrival] = []
        while self.waiting:
            position = self.waiting[0]
            key = self.promise.objects[position].key
            reason = node.disk_faults.get(key)
            if self.control.clock() >= self.end:
                reason = MissReason.PROMOTE_DEADLINE
            if reason is not None:
                self.waiting = []
                return [*came, Arrival(position, None, reason)]
            if len(node.in_dram) >= node.room:
                break
            node.in_dram.add(key)
            self.waiting.pop(0)
            came.append(Arrival(position, self.control._promised(key)))
        return came

    def close(self) -> None:
        self.waiting = []
        self.control.node.calls.append("close")


# --- the worker ---------------------------------------------------------------------------------------


class Worker:
    """The fake worker half, and the KV memory. Jobs run at once, unless `hold_loads` or `hold_saves`.

    With two `ranks`, each has one of the two runs. What `fail_*` says then happens to `failing_rank` alone, and
    what `silent_rank` has to report is kept in `unsaid`.
    """

    def __init__(self, node: Node, num_blocks: int, ranks: int = 1) -> None:
        self.node = node
        self.ranks = ranks
        self.failing_rank = 0
        self.silent_rank: int | None = None
        self.unsaid = Reports()
        self.unfinished: set[str] = set()
        self.memory: list[list[bytes | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.hold_loads = False
        self.hold_saves = False
        self.fail_load_at: int | None = None  # the position of the object that cannot be read
        self.fail_saves = False
        self.reason = MissReason.BAD_COPY  # why loads and saves fail
        self.quiet = True
        self.waiting_loads: list[LoadJob] = []
        self.waiting_saves: list[SaveJob] = []
        self.seen_loads: list[LoadJob] = []
        self.seen_saves: list[SaveJob] = []
        self.lost: dict[int, LoadMore] = {}  # jobs that end early
        self.read: dict[int, int] = {}  # objects of a job that is not over

    def step(self, jobs: Jobs) -> KVConnectorOutput:
        """What vLLM's worker hooks do with the jobs of a step."""
        self.seen_loads += jobs.loads
        self.seen_saves += jobs.saves
        self.waiting_loads += jobs.loads
        for more in jobs.more:
            self._place(more)
        self.waiting_saves += jobs.saves
        output = KVConnectorOutput(finished_recving=set(), finished_sending=set())
        reports = Reports()
        if not self.hold_loads:
            coming = [load for load in self.waiting_loads if self._still_comes(load, reports)]
            for load in self.waiting_loads:
                if load not in coming:
                    reports.loads[load.job] = self._of_ranks_load(load, self._load(load, output))
            self.waiting_loads = coming
        if not self.hold_saves:
            for save in self.waiting_saves:
                reports.saves[save.job] = self._of_ranks_save(self._save(save))
            self.waiting_saves = []
        if self.silent_rank is not None:
            self._keep_to_itself(self.silent_rank, reports, output)
        else:  # it speaks again
            output.finished_recving |= self.unfinished
            reports = reports.aggregate(self.unsaid)
            self.unsaid, self.unfinished = Reports(), set()
        if reports:
            output.kv_connector_worker_meta = reports
        return output

    def _place(self, more: LoadMore) -> None:
        """Objects have come from NVMe, or will not."""
        if more.lost_from is not None:
            self.lost[more.job] = more
        for number, load in enumerate(self.waiting_loads):
            if load.job == more.job:
                objects = list(load.objects)
                for at, place in more.places.items():
                    objects[at] = replace(
                        objects[at], generation=place.generation, table=place.table, placed=True
                    )
                self.waiting_loads[number] = replace(load, objects=tuple(objects))

    def _still_comes(self, job: LoadJob, reports: Reports) -> bool:
        """Whether the load waits for objects from NVMe; then it reads what is there."""
        wanted = job.objects[: self.lost[job.job].lost_from] if job.job in self.lost else job.objects
        if job.deadline_s <= 0 or all(one.placed for one in wanted):
            return False
        there = next(n for n, one in enumerate(wanted) if not one.placed)
        self._copy(job, there)
        reports.read[job.job] = {Rank(rank): there for rank in range(self.ranks)}
        return True

    def _copy(self, job: LoadJob, stop: int) -> tuple[int, int | None]:
        """Fills the blocks of the first `stop` objects, but for those filled before: how far it got, and the position
        of a bad one."""
        for position in range(self.read.get(job.job, 0), stop):
            wanted = job.objects[position]
            leased = any(wanted.key in keys for keys in self.node.leases.values())
            assert leased or wanted.key not in self.node.objects, "read without a lease"
            assert wanted.key not in self.node.on_disk - self.node.in_dram, "read from where it is not"
            content = self.node.pages.get(wanted.generation)
            if content is None:
                return position, None
            table = b"".join(table_of(content))
            if wanted.table not in (table, seal(table)):
                return position, position
            for number, block in enumerate(wanted.blocks):
                if block is not None:
                    self.memory[block] = list(content[number * BLOCK : (number + 1) * BLOCK])
            self.read[job.job] = position + 1
        return stop, None

    def _of_ranks_load(self, job: LoadJob, report: LoadReport) -> dict[Rank, LoadReport]:
        """Each rank's report: all is well with those that do not fail."""
        more = self.lost.pop(job.job, None)
        end = len(job.objects) if more is None or more.lost_from is None else more.lost_from
        well = LoadReport(end if job.deadline_s > 0 else 0)
        return {Rank(rank): report if rank == self.failing_rank else well for rank in range(self.ranks)}

    def _of_ranks_save(self, report: SaveReport) -> dict[Rank, SaveReport]:
        """Each rank's report, on its own run."""
        if self.ranks == 1:
            return {Rank(): report}
        reports = {}
        for rank in range(self.ranks):
            failed = self.fail_saves and rank == self.failing_rank
            sums = tuple(None if failed or runs is None else {rank: runs[rank]} for runs in report.checksums)
            reports[Rank(rank)] = SaveReport(sums, self.quiet if failed else True)
        return reports

    def _keep_to_itself(self, rank: int, reports: Reports, output: KVConnectorOutput) -> None:
        """The silent rank says nothing; vLLM waits for it with the requests that load."""
        for job, loads in reports.loads.items():
            self.unsaid.loads[job] = {Rank(rank): loads.pop(Rank(rank))}
        for job, saves in reports.saves.items():
            self.unsaid.saves[job] = {Rank(rank): saves.pop(Rank(rank))}
        self.unfinished |= output.finished_recving
        output.finished_recving = set()

    def _load(self, job: LoadJob, output: KVConnectorOutput) -> LoadReport:
        more = self.lost.get(job.job)
        valid = len(job.objects) if job.deadline_s > 0 else 0
        for limit in (self.fail_load_at, more.lost_from if more else None):
            valid = valid if limit is None else min(valid, limit)
        valid, suspect = self._copy(job, valid)
        self.read.pop(job.job, None)
        output.finished_recving.add(job.request)
        lost = [block for wanted in job.objects[valid:] for block in wanted.blocks if block is not None]
        output.invalid_block_ids |= set(lost)
        reason = None if valid == len(job.objects) else more.reason if more else self.reason
        return LoadReport(valid, reason, suspect)

    def _save(self, job: SaveJob) -> SaveReport:
        if self.fail_saves and self.ranks == 1:
            return SaveReport((None,) * len(job.objects), self.quiet, reason=self.reason)
        checksums: list[dict[int, bytes] | None] = []
        for wanted in job.objects:
            content = tuple(value for block in wanted.blocks for value in self.memory[block])
            self.node.pages[wanted.generation] = content
            checksums.append(dict(enumerate(table_of(content))))
        return SaveReport(tuple(checksums), self.quiet)


# --- the engine ---------------------------------------------------------------------------------------

_made: dict[str, Any] = {}


def model_config() -> ModelConfig:
    """The test model's configuration, made once."""
    if "model" not in _made:
        _made["model"] = ModelConfig(model=str(MODEL), dtype="float32", seed=0, max_model_len=4096)
        init_none_hash(sha256_cbor)
        _made["hasher"] = get_request_block_hasher(BLOCK, sha256_cbor)
    return _made["model"]


class Engine:
    """A vLLM scheduler with the connector, one step at a time. `ahead`: steps in flight (async scheduling)."""

    def __init__(
        self,
        node: Node,
        *,
        num_blocks: int = 200,
        max_batched: int = 256,
        role: str = "kv_both",
        ahead: bool = False,
        shake_hands: bool = True,
        max_seqs: int = 16,
        prefix_caching: bool = True,
        control: Control | None = None,
        ranks: int = 1,
        module_path: str | None = "connector",
        **extra: Any,
    ) -> None:
        self.node = node
        self.now = 1000.0
        self.control = FakeControl(node)
        self.control.clock = lambda: self.now
        self._real_control = control  # in real time
        self._module_path = module_path
        self.worker = Worker(node, num_blocks, ranks)
        self.config = self._config(role, max_batched, max_seqs, num_blocks, prefix_caching, ahead, extra)
        self.config.parallel_config.world_size = ranks
        self.kv_cache_config = self._kv_cache_config(num_blocks)
        self.scheduler = self._scheduler(ahead)
        self.connector = self.scheduler.connector
        self.half = self._first_half()
        self.tokens: dict[str, list[int]] = {}
        self.model_tokens: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}
        self.sent_stats: list[dict[str, Any]] = []  # to the frontend, of the connector
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._ahead = ahead
        if shake_hands:
            hands = {(0, 0): HANDSHAKE} if ranks == 1 else STAGES
            self.connector.set_xfer_handshake_metadata_pp_aware(hands)

    def _config(self, role, max_batched, max_seqs, num_blocks, prefix_caching, ahead, extra) -> VllmConfig:
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching)
        cache.kv_cache_layout = "LBHNC"
        settings = {"chunk_tokens": CHUNK, "min_tokens": BLOCK, "weights_version": "test"} | extra
        config = VllmConfig(
            model_config=model_config(),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_seqs,
                max_num_batched_tokens=max_batched,
                max_model_len=4096,
                is_encoder_decoder=False,
                async_scheduling=ahead,
                watermark=0.0,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_connector_module_path=self._module_path,
                kv_role=role,
                kv_connector_extra_config=settings,
            ),
            device_config=DeviceConfig("cpu"),
        )
        cache.num_gpu_blocks = num_blocks
        return config

    def _kv_cache_config(self, num_blocks: int) -> KVCacheConfig:
        return kv_cache_config(num_blocks)

    def _scheduler(self, ahead: bool) -> Scheduler:
        def start(vllm_config: Any, cache_config: Any, config: Config, breaker: Breaker) -> SchedulerHalf:
            if self._real_control is not None:
                return SchedulerHalf(vllm_config, cache_config, config, self._real_control, breaker)
            return SchedulerHalf(vllm_config, cache_config, config, self.control, breaker, lambda: self.now)

        with patch("connector.start.start_scheduler_half", start):
            return self._make_scheduler(ahead)

    def _make_scheduler(self, ahead: bool) -> Scheduler:
        return (AsyncScheduler if ahead else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=True,
        )

    def _first_half(self) -> SchedulerHalf:
        half: SchedulerHalf = self.connector._scheduler
        return half

    # requests

    def submit(
        self, name: str, prompt: Sequence[int], *, max_tokens: int = 2, params: Any = None, **more
    ) -> Request:
        """A new request; `params` are its kv_transfer_params."""
        skip = more.pop("skip_reading_prefix_cache", None)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
            skip_reading_prefix_cache=skip,
        )
        words = None if "prompt_embeds" in more else list(prompt)
        request = Request(name, words, sampling, None, block_hasher=_made["hasher"], **more)
        self.tokens[name] = []
        self.model_tokens[name] = list(prompt)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """Its client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # steps

    def step(self) -> Any:
        """One step: schedule, compute, settle (the step before, when scheduling runs ahead)."""
        output = self.scheduler.schedule()
        result = self._execute(output)
        self._in_flight.append((output, result))
        if len(self._in_flight) > (1 if self._ahead else 0):
            self._settle()
        return output

    def _settle(self) -> None:
        for outputs in self.scheduler.update_from_output(*self._in_flight.popleft()).values():
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.sent_stats.append(outputs.scheduler_stats.kv_connector_stats)
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.kv_transfer_params:
                    self.params[one.request_id] = one.kv_transfer_params

    def _execute(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled = [self._compute(name, output.num_scheduled_tokens[name]) for name in names]
        connector_output = self.worker.step(output.kv_connector_metadata)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=None if connector_output.is_empty() else connector_output,
        )

    def _compute(self, name: str, num_tokens: int) -> list[int]:
        """Reads the KV of all tokens before, writes that of the new ones, samples."""
        request = self.scheduler.requests[name]
        tokens = self.model_tokens[name]  # the model knows sampled tokens before the scheduler does
        start = request.num_computed_tokens - num_tokens  # the scheduler has advanced it already
        stop = start + num_tokens
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        expected = kv_of(request, tokens)
        for position in range(start):
            held = self.worker.memory[table[position // BLOCK]][position % BLOCK]
            assert held == expected[position], f"{name}: wrong KV at token {position} of {start}"
        for position in range(start, stop):
            self.worker.memory[table[position // BLOCK]][position % BLOCK] = expected[position]
        if stop < request.num_prompt_tokens or stop < request.num_tokens:
            return []
        if stop == len(tokens):
            tokens.append(int.from_bytes(expected[stop - 1][:2], "big") % 1000 + 1)
        return [tokens[stop]]

    def run(self, steps_max: int = 200, tick_s: float = 0.0) -> int:
        """Steps, `tick_s` apart, until the engine is idle, as vLLM's loop does; how many steps it took."""
        for steps in range(steps_max):
            self.now += tick_s
            if tick_s:
                self.node.wake()
            if not self.scheduler.has_requests() and not self._in_flight:
                return steps
            if self.scheduler.has_requests():
                self.step()
            else:
                self._settle()
        raise AssertionError(f"not idle after {steps_max} steps: {self.describe()}")

    def generate(self, name: str, prompt: Sequence[int], **more: Any) -> list[int]:
        """A request from beginning to end."""
        self.submit(name, prompt, **more)
        self.run()
        return self.tokens[name]

    def describe(self) -> str:
        """For messages of failed assertions."""
        names = list(self.scheduler.requests)
        return f"requests {names}, saves pending {self.half.saves.pending}, calls {self.node.calls}"

    def assert_nothing_left(self) -> None:
        """No reference, lease, job, memo or request is left, at the engine or at the node; no hook failed."""
        half = self.half
        assert not half.breaker.errors, half.breaker.errors
        assert not half.states
        assert not half.saves.pending
        assert half.saves.pinned_blocks == 0
        assert half.loads.under_way == 0
        assert not half.shared.leases.held
        assert self.node.is_quiet, self.node
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def kv_of(request: Any, tokens: Sequence[int]) -> list[bytes]:
    """The KV of each token: a digest of everything before it that changes it, and of all that must not be shared."""
    lora = request.lora_request.lora_name if request.lora_request else ""
    images = {f.mm_position.offset: f.identifier for f in request.mm_features}
    state = hashlib.sha256(repr((lora, request.cache_salt)).encode())
    embeds = [] if request.prompt_embeds is None else request.prompt_embeds.tolist()
    values = []
    for position, token in enumerate(tokens):
        state.update(int(token).to_bytes(4, "little"))
        state.update(images.get(position, "").encode())
        if position < len(embeds):
            state.update(repr(embeds[position]).encode())
        values.append(state.digest())
    return values


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def prompt(number: int, length: int) -> list[int]:
    """A prompt of its own."""
    return [(number * 7919 + position * 31) % 1000 + 1 for position in range(length)]


def feature(identifier: str, offset: int, length: int) -> Any:
    """A multimodal item, as far as keys look at it."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))
