"""Saves: from a step that completes chunks to their commit.

    step n     completed links that are not known to be stored get references on their blocks, and are
               offered in one reservation, in the background
    step n+k   granted: a SaveJob per node goes to the worker half. Never in step n itself, so a job's
               blocks were computed by earlier steps, and are pushed while step n+k computes
    report     from every rank -> the references go; one commit with the table put together from the runs'
               checksums; an abort if any rank failed, a run is missing, or a rank did not report in time

The references are what protects blocks: requests may finish, be preempted or aborted meanwhile. Which links a step
completes is with `connector.offers`.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from connector.boundaries import longest_hit, needed
from connector.control import Grant, NotGranted, ReserveAsk
from connector.keys import Link
from connector.metadata import Coming, Rank, SaveJob, SaveObject, SaveReport
from connector.offers import Item, Offers, Tables
from connector.requests import RequestState
from connector.shared import Shared
from connector.stats import Cause, refused
from kvstore.client import NodeAddress
from kvstore.core import Key, MissReason

MARGIN_S = 1.0  # a reservation that ends sooner is not worth starting a save with
LATE_S = 5.0  # behind the end of its reservation no rank is waited for: each of them has reported long before


@dataclass(slots=True)
class _Batch:
    """The offers of one step; `ends_s` is when their reservation ends at the latest."""

    items: list[Item]
    answers: "Future[Sequence[Grant | NotGranted]]"
    ends_s: float


@dataclass(slots=True)
class _Save:
    """A job at the workers."""

    node: NodeAddress
    items: list[tuple[Item, Grant]]
    ends_s: float
    reports: dict[Rank, SaveReport] = field(default_factory=dict)


@dataclass(slots=True)
class _Commit:
    node: str
    items: list[Item]
    answers: "Future[Sequence[bool]]"


class Saves:
    """All saves of this engine."""

    def __init__(self, shared: Shared) -> None:
        self.offers = Offers(shared)
        self._shared = shared
        self._control = shared.control
        self._config = shared.config
        self._known = shared.known
        self._stats = shared.stats
        self._clock = shared.clock
        self._batches: list[_Batch] = []
        self._jobs: dict[int, _Save] = {}
        self._commits: list[_Commit] = []
        self._next_job = 0
        self._offer_numbers = count(1)
        self._coming: list[Coming] = []

    @property
    def pending(self) -> bool:
        """Whether the engine must go on stepping, even without requests."""
        return bool(self._batches or self._jobs or self._commits)

    @property
    def pinned_blocks(self) -> int:
        """References on blocks."""
        return self.offers.pins.count

    def leave_no_block(self, cause: str) -> bool:
        """Gives everything up; whether the engine's pool then holds no KV any more, used or cached."""
        self.give_up_all(cause)
        return self.offers.pins.empty_pool()

    # --- planning -------------------------------------------------------------------------------------

    def plan(self, scheduler_output: Any, states: Mapping[str, RequestState]) -> None:
        """Offers what this step completes, in one reservation."""
        items: list[Item] = []
        try:
            for item in self.offers.completed_by(scheduler_output, states):
                items.append(item)  # noqa: PERF402 - those before an exception, too
        finally:  # references that were taken are always followed up
            if items:
                self._offer(items)
            if self._config.layerwise and len(self._shared.kinds) == 1:
                for item in items:
                    item.offer = next(self._offer_numbers)
                    self._coming.append(Coming(item.offer, item.blocks))

    def take_coming(self) -> list[Coming]:
        """What this step completes, for workers that gather it while they compute it."""
        coming, self._coming = self._coming, []
        return coming

    def finish(self, state: RequestState, tables: Tables) -> Sequence[Link]:
        """Offers what the end of a request completes; its chain, as others may want it.

        Args:
            state: the request.
            tables: its blocks, by group, which are about to go.
        """
        items: list[Item] = []
        try:
            for item in self.offers.ended_by(state, tables):
                items.append(item)  # noqa: PERF402 - those before an exception, too
        finally:
            if items:
                self._offer(items)
        links = [*(state.links or ()), *state.grown]
        whole = [link for link in links if not link.tail]
        tail = links[-1:] if links and links[-1].tail else []
        return (*whole, *(x for x in tail if x.start == (whole[-1].stop if whole else 0)))

    def _offer(self, items: list[Item]) -> None:
        asks = [ReserveAsk(i.link.key, i.link.parent, i.link.depth, i.size_bytes, i.cold) for i in items]
        self._stats.offered_objects += len(items)
        ends_s = self._clock() + self._config.save_timeout_s
        answers = self._control.reserve(asks, self._config.save_timeout_s)
        self._batches.append(_Batch(items, answers, ends_s))

    # --- granted --------------------------------------------------------------------------------------

    def take_ready(self) -> list[SaveJob]:
        """Jobs whose reservations have been answered since the last step."""
        answered = [batch for batch in self._batches if batch.answers.done()]
        self._batches = [batch for batch in self._batches if batch not in answered]
        return [job for batch in answered for job in self._granted(batch)]

    def _granted(self, batch: _Batch) -> Iterator[SaveJob]:
        if batch.answers.exception() is not None:
            self.offers.drop(batch.items, Cause.NODE_DOWN)
            return
        by_node: dict[tuple[bytes, bytes, int], list[tuple[Item, Grant]]] = {}
        void: list[tuple[Item, Grant]] = []
        for item, answer in zip(batch.items, batch.answers.result(), strict=True):
            if isinstance(answer, Grant):
                place = answer.node.node, answer.node.boot, item.link.kind
                group = void if item.over else by_node.setdefault(place, [])
                group.append((item, answer))
            elif not item.over:
                self._not_granted(item, answer)
        if void:
            self._control.abort([grant for _, grant in void], quiet=True)
        for granted in by_node.values():
            if not self._shared.paths.allows(granted[0][1].node):
                self._hand_back(granted, refused(MissReason.BREAKER_OPEN))
            elif (job := self._start(granted, batch)) is not None:
                yield job

    def _not_granted(self, item: Item, answer: NotGranted) -> None:
        node = answer.node.node.hex() if answer.node is not None else ""
        self.offers.let_go(item, stored_at=node if answer.stored else None)
        if not answer.stored:
            self._stats.drop(refused(answer.reason), [item.tokens], item.request)

    def _start(self, granted: list[tuple[Item, Grant]], batch: _Batch) -> SaveJob | None:
        node = granted[0][1].node
        deadline_s = batch.ends_s - self._clock() - MARGIN_S
        if deadline_s <= 0:
            self._hand_back(granted, Cause.RESERVATION_EXPIRED)
            return None
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = _Save(node, granted, batch.ends_s)
        for item, _ in granted:
            self.offers.placed[item.link.key] = node.node.hex()
        objects = tuple(
            SaveObject(
                x.link.key,
                grant.generation,
                grant.extents,
                x.size_bytes,
                x.blocks,
                x.request,
                x.link.kind,
                x.offer,
            )
            for x, grant in granted
        )
        return SaveJob(job, node, objects, deadline_s)

    def _hand_back(self, granted: list[tuple[Item, Grant]], cause: str) -> None:
        """Nothing has been written yet."""
        self._control.abort([grant for _, grant in granted], quiet=True)
        self.offers.drop([item for item, _ in granted], cause)

    # --- reported -------------------------------------------------------------------------------------

    def reported(self, job: int, reports: Mapping[Rank, SaveReport]) -> None:
        """What ranks say of a job. Only the first report of every rank counts."""
        save = self._jobs.get(job)
        if save is None:
            self._stats.say_once("late save", f"save {job} was reported late or twice by a rank; ignored")
            return
        save.reports = {**reports, **save.reports}
        if len(save.reports) == self._shared.world_size:
            del self._jobs[job]
            self._settle(save)

    def _settle(self, save: _Save) -> None:
        self._learn(save)
        self._stats.written(list(save.reports.values()))
        commits: list[tuple[Grant, bytes]] = []
        whole: list[Item] = []
        broken: list[tuple[Item, Grant]] = []
        for position, (item, grant) in enumerate(save.items):
            if item.over:
                continue
            table = self._table(save, position)
            if table is None:
                broken.append((item, grant))
            else:
                commits.append((grant, table))
                whole.append(item)
        if commits:
            self._commits.append(_Commit(save.node.node.hex(), whole, self._control.commit(commits)))
        if broken:
            quiet = all(report.quiet for report in save.reports.values())
            self._control.abort([grant for _, grant in broken], quiet=quiet)
            self.offers.drop([item for item, _ in broken], Cause.NOT_WRITTEN)
        for item, _ in save.items:
            self.offers.let_go(item)
        self.offers.placed.update({item.link.key: save.node.node.hex() for item in whole})

    def _learn(self, save: _Save) -> None:
        """Whether the node could be written to. Ranks that write nothing know nothing."""
        failed = [report for report in save.reports.values() if None in report.checksums]
        if failed:
            self._shared.paths.failed(save.node, failed[0].reason)
        else:
            self._shared.paths.moved(save.node)

    def _table(self, save: _Save, position: int) -> bytes | None:
        """The object's table from all ranks' runs; None when a rank failed or a run is missing."""
        geometry = self.offers.geometries[save.items[position][0].link.kind]
        runs: dict[int, bytes] = {}
        for report in save.reports.values():
            checksums = report.checksums[position]
            if checksums is None:
                return None
            if not runs.keys().isdisjoint(checksums):  # whose bytes are there, nobody knows
                self._stats.say_once(
                    "same run", "two ranks have written the same run, which is a bug; aborted"
                )
                return None
            runs.update(checksums)
        if set(runs) != set(range(geometry.num_runs)):
            return None
        return b"".join(runs[index] for index in range(geometry.num_runs))

    def tick(self) -> None:
        """Takes the answers to commits, and gives up on ranks that do not report."""
        now = self._clock()
        for job in [job for job, save in self._jobs.items() if now > save.ends_s + LATE_S]:
            self._give_up(self._jobs.pop(job), Cause.NO_REPORT)
        for commit in [c for c in self._commits if c.answers.done()]:
            self._commits.remove(commit)
            answered = commit.answers.exception() is None
            answers = commit.answers.result() if answered else [False] * len(commit.items)
            for item, committed in zip(commit.items, answers, strict=True):
                self.offers.placed.pop(item.link.key, None)
                if committed:
                    self._known.add(item.link.key, commit.node)
                    self._stats.committed(item.tokens)
                else:
                    self._stats.drop(Cause.NOT_COMMITTED, [item.tokens], item.request)

    def give_up_all(self, cause: str) -> None:
        """Ends everything that is not at its commit; all references go at once."""
        for job in list(self._jobs):
            self._give_up(self._jobs.pop(job), cause)
        for batch in self._batches:
            self.offers.drop(batch.items, cause)

    def _give_up(self, save: _Save, cause: str, keys: Container[Key] | None = None) -> None:
        """Ends a save (or these keys of it). Ranks may still read the blocks, for bytes that nobody will commit."""
        ended = [(x, grant) for x, grant in save.items if not x.over and (keys is None or x.link.key in keys)]
        if ended:
            self._control.abort([grant for _, grant in ended], quiet=False)
        self.offers.drop([item for item, _ in ended], cause)

    def roll_back(self, state: RequestState) -> None:
        """vLLM has just found KV that the request had to be invalid: its tokens are computed again from there on.

        Under MultiConnector another connector may say so of what it brought, after the step that used it.
        """
        if keys := self.offers.roll_back(state):
            cause = Cause.INVALID
            for save in self._jobs.values():
                self._give_up(save, cause, keys)
            for batch in self._batches:
                self.offers.drop([item for item in batch.items if item.link.key in keys], cause)

    def covered(self, links: Sequence[Link]) -> tuple[int, list[str]]:
        """How many of a chain's first links are stored or under way, up to where a prompt can go on, and the ids of
        the nodes that have them."""
        placed = self._placed()

        def node_of(key: Key) -> str | None:
            node = placed.get(key)
            return self._known.node_of(key) if node is None else node

        kinds = self._shared.kinds
        num_links = longest_hit(links, kinds, lambda key: node_of(key) is not None)
        pieces = needed(links, num_links - 1, kinds) if num_links else []
        nodes = dict.fromkeys(node_of(one.key) for one in (*links[:num_links], *pieces))
        return num_links, [node for node in nodes if node]

    def _placed(self) -> dict[Key, str | None]:
        """The node of each link under way: empty where that is open, None where nobody took it."""
        placed: dict[Key, str | None] = dict(self.offers.placed)
        for batch in self._batches:
            if not batch.answers.done():
                continue
            answers = (
                batch.answers.result() if batch.answers.exception() is None else [None] * len(batch.items)
            )
            for item, answer in zip(batch.items, answers, strict=True):
                if item.over:
                    continue
                taken = isinstance(answer, Grant) or (answer is not None and answer.stored)
                node = answer.node if answer is not None and taken else None
                placed[item.link.key] = node.node.hex() if node is not None else None
        return placed
