"""A few engines on one node, to which anything may happen in any order; the books that must balance afterwards.

Everything here is real but the model, the worker halves and the node (`tests.connector.support`). The KV of the fake
model depends on all that must tell requests apart (adapter, salt, images, embeddings), so that sharing too much shows
as a wrong token. Invariants are checked after every step, everything left behind at the end.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.loads import LATE_S as LOAD_LATE_S
from connector.metadata import Jobs, LoadJob, LoadReport, Reports
from connector.saves import LATE_S as SAVE_LATE_S
from connector.saves import MARGIN_S
from kvstore.core import MissReason
from tests.connector.support import BLOCK, CHUNK, Engine, Node, Worker, prompt

LENGTHS = (2 * CHUNK, 3 * CHUNK + 2 * BLOCK + 5, 2 * CHUNK + BLOCK - 1, 5 * CHUNK + 1, BLOCK + 3, 6 * CHUNK)
TEXTS = [prompt(number, length) for number, length in enumerate(LENGTHS)]
TEXTS += [TEXTS[1][: 2 * CHUNK] + prompt(50, 90), TEXTS[5][: 3 * CHUNK] + prompt(51, 40), TEXTS[5][:CHUNK]]
KINDS = (*["plain"] * 6, "adapter", "other adapter", "salt", "embeddings", "unread", "growing")
FAULTS = (
    "late loads", "late saves", "first load fails", "second load fails", "bits flip", "saves fail", "silent rank",
    "reports lost", "reports doubled", "node down", "index down", "node full", "slow answers", "answers overtake",
)  # fmt: skip


class Shape(NamedTuple):
    """What an engine is like."""

    num_blocks: int
    max_batched: int
    ahead: bool
    caching: bool
    ranks: int
    write_back: bool


class FlakyWorker(Worker):
    """Its reports may be lost, or come twice."""

    def __init__(self, node: Node, num_blocks: int, ranks: int, now: Any, tally: Counter[str]) -> None:
        super().__init__(node, num_blocks, ranks)
        self.lose = self.double = False
        self._said = Reports()
        self.loads_end: dict[int, float] = {}  # by job, as far as a rank may take for it
        self.saves_end: dict[int, float] = {}
        self._failed: set[str] = set()
        self._now = now
        self._tally = tally

    def step(self, jobs: Jobs) -> KVConnectorOutput:
        for job in jobs.loads:
            self.loads_end[job.job] = self._now() + job.deadline_s
            assert job.request not in self._failed, "promised again after a load that failed"
        self.saves_end |= {job.job: self._now() + job.deadline_s for job in jobs.saves}
        output = super().step(jobs)
        reports = output.kv_connector_worker_meta
        if reports is not None and self.lose:
            self._tally["reports lost"] += len(reports.loads) + len(reports.saves)
            reports = None
        if self.double:
            again = self._said
            self._tally["reports doubled"] += len(again.loads) + len(again.saves)
            owed = (
                self.unsaid.loads.keys() & again.loads.keys(),
                self.unsaid.saves.keys() & again.saves.keys(),
            )
            self._tally["loads doubled while a rank is silent"] += len(owed[0])
            self._tally["saves doubled while a rank is silent"] += len(owed[1])
            reports = again if reports is None else reports.aggregate(again)
        if reports is not None:
            self._said = reports
        output.kv_connector_worker_meta = reports
        return output

    def _load(self, job: LoadJob, output: KVConnectorOutput) -> LoadReport:
        """A load that is over its deadline reads nothing any more."""
        fail_load_at, reason = self.fail_load_at, self.reason
        if self._now() > self.loads_end[job.job] and job.deadline_s > 0:
            self.fail_load_at, self.reason = 0, MissReason.TOO_SLOW
        report = super()._load(job, output)
        if report.valid < len(job.objects):
            self._failed.add(job.request)
        self.fail_load_at, self.reason = fail_load_at, reason
        return report


class StormEngine(Engine):
    """An engine of which every step is checked."""

    def __init__(self, node: Node, shape: Shape, tally: Counter[str], **extra: Any) -> None:
        self.shape, self.tally = shape, tally
        super().__init__(
            node,
            num_blocks=shape.num_blocks,
            max_batched=shape.max_batched,
            ahead=shape.ahead,
            prefix_caching=shape.caching,
            ranks=shape.ranks,
            write_back=shape.write_back,
            **extra,
        )
        self.worker: FlakyWorker = FlakyWorker(node, shape.num_blocks, shape.ranks, lambda: self.now, tally)
        self.preemptions = 0
        self.vllm_queries = self.vllm_hits = 0
        self.before_reset: set[str] = set()
        self.was_reset = False

    def step(self) -> Any:
        """One step, whose work at the store has a bound."""
        half, calls = self.half, self.node.calls
        names = set(self.scheduler.requests)
        waiting = len(names)
        leases = len(half.shared.leases.held)
        under_way = len(half.saves._batches) + len(half.saves._jobs) + len(half.saves._commits)
        del calls[:]
        output = super().step()
        made = Counter(call.partition(" ")[0] for call in calls)
        self.tally["calls in the busiest step"] = max(self.tally["calls in the busiest step"], len(calls))
        ended = len(names - set(self.scheduler.requests))
        assert made["reserve"] <= 1 + ended, (
            "one reservation for what a step completes, one at a request's end"
        )
        assert made["lookup"] + made["acquire"] <= 2 * waiting, f"{made} for {waiting} requests"
        assert made["release"] <= 2 * (leases + waiting), f"{made}: more releases than promises"
        assert made["renew"] <= leases + waiting
        assert made["commit"] + made["abort"] <= 2 * under_way, f"{made} for {under_way} saves"
        self._check(output)
        return output

    def _check(self, output: Any) -> None:
        assert not self.half.breaker.errors, self.half.breaker.errors
        pool = self.scheduler.kv_cache_manager.block_pool
        pinned = self.half.saves.pinned_blocks
        assert pinned <= self.half.shared.config.pinned_share * pool.num_gpu_blocks
        if not self.shape.ahead:  # which gives blocks back a step later
            tables = [
                self.scheduler.kv_cache_manager.get_block_ids(name)[0] for name in self.scheduler.requests
            ]
            held = sum(block.ref_cnt for block in pool.blocks if not block.is_null)
            assert held == pinned + sum(map(len, tables)), "references that nobody owns"
        self._check_jobs()
        self.preemptions += len(output.preempted_req_ids or ())
        for request in output.scheduled_new_reqs:
            chunked = output.num_scheduled_tokens[request.req_id] + request.num_computed_tokens
            self.tally["chunked prefills"] += chunked < len(request.prompt_token_ids or ())

    def _check_jobs(self) -> None:
        """What a rank has still to report is under way, however often the others have reported it."""
        worker, half = self.worker, self.half
        for job in worker.unsaid.loads:
            late = self.now > worker.loads_end[job] + LOAD_LATE_S
            assert late or job in half.loads._jobs, "a load was over before all ranks had reported it"
        for job in () if self.was_reset else worker.unsaid.saves:  # a reset ends all saves
            late = self.now > worker.saves_end[job] + MARGIN_S + SAVE_LATE_S
            assert late or job in half.saves._jobs, "a save was over before all ranks had reported it"

    def _settle(self) -> None:
        stats = self.scheduler.connector_prefix_cache_stats  # before vLLM takes it away
        queries, hits = stats.queries, stats.hits
        super()._settle()
        self.vllm_queries += queries
        self.vllm_hits += hits

    def is_loading(self, name: str) -> bool:
        """Whether blocks of the request are being filled."""
        return bool(self.scheduler.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS)

    def reconcile(self, unseen: bool) -> None:
        """Queried is hit and missed, and each request counts once, as vLLM has it.

        vLLM also counts requests that never ask us (`unseen`), and again those whose load failed.
        """
        stats, lines = self.half.shared.stats, self.control.lines
        for line in lines:
            assert 0 <= line.pulled_tokens <= line.promised_tokens <= line.queried_tokens, line
        assert stats.queried_tokens == sum(line.queried_tokens for line in lines)
        assert stats.promised_tokens == sum(line.promised_tokens for line in lines) == self.vllm_hits
        assert stats.pulled_tokens == sum(line.pulled_tokens for line in lines)
        if not unseen and not stats.loads_failed:
            assert stats.queried_tokens == self.vllm_queries
            self.tally["exact counts"] += 1


@dataclass
class Submitted:
    """A request, and the engine that serves it."""

    engine: StormEngine
    name: str


@cache
def written(adapters: Path) -> tuple[Node, list[dict[str, Any]]]:
    """A node that holds all texts in some kinds, and the hand-offs of those who wrote them."""
    node = Node()
    writer = Engine(node, num_blocks=400, max_batched=512)
    for kind in ("adapter", "salt", "embeddings", "plain"):
        for number, text in enumerate(TEXTS):
            words, more = request_of(text, kind, adapters)
            writer.generate(f"{kind} {number}", words, **more)
    return node, [writer.params[f"plain {number}"] for number in range(len(TEXTS))]


def request_of(text: list[int], kind: str, adapters: Path) -> tuple[list[int], dict[str, Any]]:
    """The prompt of a request of this kind, and what else makes it up."""
    if kind in {"adapter", "other adapter"}:
        number = 1 + (kind == "other adapter")
        return text, {"lora_request": LoRARequest(kind, number, str(adapters / str(number)))}
    if kind == "embeddings":
        embeds = torch.tensor(text, dtype=torch.float32).unsqueeze(1).repeat(1, 2)
        return [0] * len(text), {"prompt_embeds": embeds}
    more: dict[str, dict[str, Any]] = {
        "salt": {"cache_salt": "pepper"},
        "unread": {"skip_reading_prefix_cache": True},
        "growing": {"resumable": True},
    }
    return text, more.get(kind, {})


class Storm:
    """Acts; each takes numbers that choose among what there is."""

    def __init__(self, shapes: Sequence[Shape], adapters: Path, tally: Counter[str]) -> None:
        before, notes = written(adapters)
        self.node = Node(objects=dict(before.objects), pages=dict(before.pages), generations=count(1_000))
        self.tally = tally
        self.adapters = adapters
        self.notes = list(notes)
        self.kinds = {"plain"}
        self.engines = [StormEngine(self.node, shape, tally) for shape in shapes]
        self.submitted: list[Submitted] = []
        self._names = 0

    # --- acts -----------------------------------------------------------------------------------------

    def submit(self, which: int, *, text: int, kind: str, tokens: int, copies: int, note: int) -> None:
        """`copies` requests for one prompt, as n > 1 makes them. `note`: none, one of the hand-offs, or rubbish."""
        engine = self.engines[which % len(self.engines)]
        notes = [None, None, *self.notes, {"kvstore": {"tokens": "many"}}]
        for _ in range(copies):
            name, self._names = f"r{self._names}", self._names + 1
            words, more = request_of(TEXTS[text % len(TEXTS)], kind, self.adapters)
            engine.submit(name, words, max_tokens=tokens, params=notes[note % len(notes)], **more)
            self.submitted.append(Submitted(engine, name))
            if kind not in {"unread", "growing"} and not engine.was_reset:
                engine.before_reset.add(name)
            self.tally[kind] += 1
            self.kinds.add(kind)

    def abort(self, which: int) -> None:
        """Wherever the request is: waiting, held back, loading, computing, or over."""
        alive = [one for one in self.submitted if one.name in one.engine.scheduler.requests]
        loading = [one for one in alive if one.engine.is_loading(one.name)]
        if alive:
            some = loading if loading and which % 2 else alive
            one = some[which % len(some)]
            self.tally[f"aborted {one.engine.scheduler.requests[one.name].status.name.lower()}"] += 1
            one.engine.abort(one.name)

    def step(self, which: int, times: int, faults: Sequence[str], pick: int) -> None:
        """Some steps of an engine under these faults."""
        engine = self.engines[which % len(self.engines)]
        with self._under(engine, faults, pick):
            for _ in range(times):
                self.node.wake()
                if engine.scheduler.has_requests():
                    engine.step()
                elif engine._in_flight:
                    engine._settle()
        for one in [one for one in self.submitted if one.engine is engine]:
            if one.name in engine.params:
                self.notes[-1] = engine.params.pop(one.name)

    @contextmanager
    def _under(self, engine: StormEngine, faults: Sequence[str], pick: int) -> Iterator[None]:
        worker, control, node = engine.worker, engine.control, self.node
        for fault in faults:
            self.tally[fault] += 1
        worker.hold_loads, worker.hold_saves = "late loads" in faults, "late saves" in faults
        failing = {"first load fails": 0, "second load fails": 1}
        worker.fail_load_at = next((failing[fault] for fault in faults if fault in failing), None)
        worker.fail_saves, worker.quiet = "saves fail" in faults, bool(pick % 2)
        worker.failing_rank = pick % engine.shape.ranks
        worker.silent_rank = pick % 2 if "silent rank" in faults and engine.shape.ranks == 2 else None
        worker.lose = "reports lost" in faults
        worker.double = "reports doubled" in faults or ("silent rank" in faults and pick % 4 < 2)
        node.down, control.index_down = "node down" in faults, "index down" in faults
        node.refuse = MissReason.NO_ROOM if "node full" in faults else None
        control.manual = bool({"slow answers", "answers overtake"} & {*faults})
        if "answers overtake" in faults:
            control._queue.rotate(pick)
        control.answer(min(pick % 3, len(control._queue)) if control.manual else None)
        flipped = self._flip(pick) if "bits flip" in faults else None
        yield
        if flipped is not None:
            self.node.pages[flipped[0]] = flipped[1]
        node.down = False
        worker.lose = worker.double = False

    def _flip(self, pick: int) -> tuple[bytes, Any] | None:
        """Another content than what the table of an object says."""
        if not self.node.objects:
            return None
        stored = list(self.node.objects.values())[pick % len(self.node.objects)]
        content = self.node.pages[stored.generation]
        self.node.pages[stored.generation] = (b"flipped", *content[1:])
        return stored.generation, content

    def evict(self, which: int) -> None:
        """An object that nobody has leased goes."""
        leased = {key for keys in self.node.leases.values() for key in keys}
        if free := [key for key in self.node.objects if key not in leased]:
            key = free[which % len(free)]
            del self.node.objects[key]
            self.node.on_disk.discard(key)
            self.tally["evicted"] += 1

    def spill(self, which: int) -> None:
        """An object that nobody has leased is on NVMe alone."""
        leased = {key for keys in self.node.leases.values() for key in keys}
        if free := [key for key in self.node.objects if key not in leased]:
            self.node.on_disk.add(free[which % len(free)])
            self.tally["spilled"] += 1

    def wait(self, seconds: float) -> None:
        """Time passes everywhere."""
        for engine in self.engines:
            engine.now += seconds
        self.node.wake()

    def reset(self, which: int) -> None:
        """New weights in one engine."""
        engine = self.engines[which % len(self.engines)]
        engine.was_reset = True
        self.tally["resets"] += 1
        self.tally["clean resets"] += engine.scheduler.reset_prefix_cache(reset_connector=True)

    # --- the end --------------------------------------------------------------------------------------

    def calm(self) -> None:
        """All is answered, every request comes to its end, and time enough passes; nothing is left, all counts."""
        for engine in self.engines:
            with self._under(engine, (), 0):
                for name, request in list(engine.scheduler.requests.items()):
                    if request.resumable:
                        engine.abort(name)  # it would wait for more of its prompt for ever
                engine.run(4000, tick_s=0.5)
                engine.now += 300.0
                engine.generate("last", prompt(99, BLOCK - 1))
        self.node.reserved.clear()  # of commits and aborts that the node was not there for: they expire
        for engine in self.engines:
            engine.assert_nothing_left()
            engine.reconcile(bool({"unread", "growing"} & self.kinds))
            self._count(engine)

    def _count(self, engine: StormEngine) -> None:
        stats = engine.half.shared.stats
        self.tally["preemptions"] += engine.preemptions
        self.tally["loads"] += stats.loads
        self.tally["loads failed"] += stats.loads_failed
        self.tally["committed"] += stats.committed_objects
        promised = {line.request for line in engine.control.lines if line.promised_tokens}
        self.tally["requests"] += len(engine.before_reset)
        self.tally["promised"] += len(promised & engine.before_reset)
        self.tally["ahead"] += engine.shape.ahead
        for reason, times in stats.misses.items():
            self.tally[f"missed {reason}"] += times

    def read_back(self) -> None:
        """Whatever is stored is right: every token's KV is checked as it is used."""
        reader = Engine(self.node, num_blocks=400, max_batched=512, prefix_caching=False, save=False)
        for number, text in enumerate(TEXTS):
            for kind in self.kinds & {"plain", "adapter", "salt", "embeddings"}:
                words, more = request_of(text, kind, self.adapters)
                reader.generate(f"{kind} {number}", words, **more)
        reader.assert_nothing_left()
