"""Several clients, their memory of what they were told, and a store that must keep its word.

`Sim` drives the real Store over a real arena in virtual time. Every act is a plain method that takes small
numbers, so a Hypothesis machine and a seeded walk can both call it. The model knows no policy and no pages:
it remembers what was promised to whom until when, and what bytes every commit stood for.

Writers write for real, and go on writing where they may (after an abort that was not quiet, after their
reservation was over): if the store reused such pages too early, somebody's bytes would change.

With an NVMe tier, a twin of the porter carries copies between the tiers when an act says so: in any order, with a
device that fails, goes away and comes back. A promotion that was given up writes garbage to its pages until it ends.
"""

from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

from kvstore.core import Key, Manifest, MissReason, Tier, checksums, limits, pages_for, proves
from kvstore.policy import PrefixLru
from kvstore.store import Check, Promotion, SpillMode, Store, Tiering, TierUse, is_sound
from kvstore.tiers import Arena
from kvstore.wire import (
    Acquire,
    Busy,
    ClientId,
    CommitItem,
    Committed,
    Drop,
    Exists,
    Filling,
    Generation,
    Granted,
    LeaseId,
    Miss,
    OnDisk,
    Pages,
    Prefetch,
    Refused,
    Release,
    Renew,
    ReserveAnswer,
    ReserveItem,
    Resident,
    Stale,
    Suspect,
)
from tests.support.answers import received
from tests.support.disks import Carrier, MemoryDisk, MemoryDisks

PAGE_BYTES = 4096
MANIFEST = Manifest(
    weights="sim",
    model={},
    kv_dtype="f32",
    tile_format="sim",
    chunk_tokens=40,
    unit_tokens=1,
    lanes=((2, 2, 64),),
)
GEOMETRY = MANIFEST.geometry
NAMESPACE = MANIFEST.namespace
TOKENS_PER_PAGE = PAGE_BYTES // GEOMETRY.bytes_per_unit
SIZES = [1, TOKENS_PER_PAGE - 1, TOKENS_PER_PAGE, TOKENS_PER_PAGE + 1, 2 * TOKENS_PER_PAGE, 40]
"""Tokens of an object: around the edges of pages, and a whole chunk."""

PATHS = ["a", "ab", "abc", "abcd", "abx", "abxy", "p", "pq", "pqr", "s", "t", "u"]
"""Prompts that share beginnings; each path names the chunk at its end."""


def key_of(path: str) -> Key:
    return Key(path.encode().ljust(32, b"."))


def is_sealed(lease: int) -> bool:
    """Whether the reader of this lease asks for seals: half of them do."""
    return lease % 2 == 0


@dataclass
class Grant:
    """What a writer was granted."""

    path: str
    generation: Generation
    extents: tuple[tuple[int, int], ...]
    content: bytes
    since_s: float
    deadline_s: float
    ended: bool = False  # committed, aborted, or answered Stale
    late_until_s: float = 0.0  # until when writes may still land after it ended

    def lives(self, now_s: float) -> bool:
        return not self.ended and now_s < self.deadline_s

    def may_write(self, now_s: float) -> bool:
        """Its own words: until it ends; then while its pages are held."""
        if self.ended:
            return now_s < self.late_until_s
        return now_s < self.deadline_s + limits.HOLD_S


@dataclass
class Client:
    """A process. When it crashes its promises stay, and nobody keeps them up."""

    id: ClientId
    grants: list[Grant] = field(default_factory=list)
    has_committed: bool = False


@dataclass
class Leased:
    """A promise: these pages hold this content, or will when they are asked for (`resident` is None so far)."""

    client: ClientId
    name: int
    path: str
    generation: Generation
    resident: Resident | None
    since_s: float
    deadline_s: float


@dataclass
class Commit:
    """What a generation stands for."""

    path: str
    content: bytes
    flipped: bool = False


class Sim:
    """The acts, and after each of them the invariants."""

    def __init__(
        self,
        pages: int,
        sizes: list[int],
        num_clients: int = 3,
        disk_pages: int = 0,
        spill: SpillMode = SpillMode.EVICT,
    ) -> None:
        self.now_s = self.ticked_s = 0.0
        self.disk = MemoryDisk(disk_pages, PAGE_BYTES)
        self.disks = MemoryDisks(self.disk)
        self.has_disk = disk_pages > 0
        self.spill = spill
        self.arena = Arena.create(pages * PAGE_BYTES, PAGE_BYTES, huge_pages=False, lock=False)
        self.random = Random(0)  # of all boots: no generation comes twice
        self.boot()
        self.damaged: set[Generation] = set()  # on the device
        self.down: set[str] = set()  # paths that are only on a device that is down
        self.orphaning = 0
        self.sizes = {
            path: SIZES[size % len(SIZES)] * GEOMETRY.bytes_per_unit
            for path, size in zip(PATHS, sizes, strict=True)
        }
        self.num_clients = 0
        self.everybody: list[Client] = []  # who ever lived
        self.clients = [self.new_client() for _ in range(num_clients)]
        self.grants: list[Grant] = []  # of all clients there ever were
        self.commits: dict[Generation, Commit] = {}
        self.leased: list[Leased] = []
        self.lost: dict[str, MissReason] = {}
        self.checks: list[Check] = []
        self.ready: set[str] = set()
        self.flips_found = 0
        self.down_at_s = -1.0  # when the device was down last
        self.failed: set[str] = set()  # paths of promotions that ended, perhaps badly
        self.bad: set[str] = set()  # paths whose copy was found bad on its way

    def boot(self) -> None:
        """A store that has nothing yet."""
        tiering = Tiering(self.disks, self.spill) if self.has_disk else None
        self.store = Store(
            self.arena.page_count,
            PAGE_BYTES,
            PrefixLru(),
            lambda: self.now_s,
            self.random.randbytes,
            tiering=tiering,
        )
        self.carrier = Carrier(self.store, self.disks, self.arena)
        self.carrier.sound = lambda record: record.generation not in self.damaged
        self.store.open_namespace(NAMESPACE, MANIFEST.encode())

    def close(self) -> None:
        self.arena.close()

    def new_client(self) -> Client:
        self.num_clients += 1
        self.everybody.append(Client(ClientId(self.num_clients.to_bytes(16, "big"))))
        return self.everybody[-1]

    # --- writers ----------------------------------------------------------------------------------------

    def reserve(self, who: int, which: int, how_many: int, duration_s: float, cold: bool) -> None:
        """A chain's last chunks, as an engine offers them."""
        client = self.client(who)
        path = PATHS[which % len(PATHS)]
        paths = [path[: depth + 1] for depth in range(max(0, len(path) - how_many), len(path))]
        batch = [self.item(offered, cold) for offered in paths]
        before = self.store.snapshot().tiers[Tier.DRAM]
        held_before = self.pages_held_by(client)
        answers = self.reserve_in_slices(client, batch, duration_s)
        assert len(answers) == len(batch)
        for offered, answer in zip(paths, answers, strict=True):
            match answer:
                case Granted():
                    if len(paths) == 1 and answer.generation not in {each.generation for each in self.grants}:
                        self.check_share(client, before, offered)
                    self.granted(client, offered, answer, duration_s)
                case Exists():
                    assert offered in self.ready, f"{offered} is said to exist, and was not ready"
                case Busy():
                    assert self.states().get(offered) in ("filling", "down")
                case Refused(reason=MissReason.LEASE_LIMIT):
                    assert offered in self.ready
                case Refused():
                    need = self.pages_of(offered)
                    floor = limits.OBJECTS_PER_CLIENT_MIN * pages_for(
                        SIZES[-1] * GEOMETRY.bytes_per_unit, PAGE_BYTES
                    )
                    entitled = len(paths) == 1 and held_before + need <= floor
                    assert not (entitled and before.free_pages >= need), (
                        "refused what every client may always have"
                    )
        self.settle()
        if len(paths) == 1 and isinstance(answers[0], Exists):
            self.acquire_one(client, path)

    def reserve_in_slices(
        self, client: Client, batch: list[ReserveItem], duration_s: float
    ) -> tuple[ReserveAnswer, ...]:
        """A key at a time, with what a node does by itself in between."""
        steps = self.store.reserving(client.id, NAMESPACE, batch, duration_s)
        with patch.object(limits, "RESERVED_PER_SLICE", 1):
            while True:
                try:
                    next(steps)
                except StopIteration as ended:
                    answers: tuple[ReserveAnswer, ...] = ended.value
                    return answers
                self.store.tick()
                self.store.audit()
                self.notice_vanished()

    def check_share(self, client: Client, before: TierUse, path: str) -> None:
        """Beyond what every client may always have, writers stay within their share together: the pages that are
        held count as much as those being filled. See store/clients.py for those who never committed."""
        now_s = self.now_s
        own = [grant for grant in client.grants if grant.lives(now_s) or now_s < grant.late_until_s]
        floor = limits.OBJECTS_PER_CLIENT_MIN * pages_for(SIZES[-1] * GEOMETRY.bytes_per_unit, PAGE_BYTES)
        if sum(self.pages_of(grant.path) for grant in own) + self.pages_of(path) <= floor:
            return
        share = int(before.pages * limits.RESERVED_AND_HELD_SHARE_MAX)
        doubtful = sum(self.pages_held_by(each) for each in self.everybody if not each.has_committed)
        if client.has_committed:
            share += max(0, doubtful - int(share * limits.CLIENT_SHARE_WITH_OTHERS))
        assert before.reserved_pages + before.held_pages + self.pages_of(path) <= share, (
            "writers share too much"
        )

    def put(self, who: int, which: int, duration_s: float) -> None:
        """All of a chain, from reservation to commit, as most do it."""
        client = self.client(who)
        path = PATHS[which % len(PATHS)]
        self.reserve(who, which, len(path), duration_s, cold=False)
        for index, grant in enumerate(client.grants):
            if path.startswith(grant.path) and grant.lives(self.now_s):
                self.commit(who, index)

    def granted(self, client: Client, path: str, answer: Granted, duration_s: float) -> None:
        assert path not in self.ready, "a ready object is granted away"
        if path in self.down:
            self.lost[path] = MissReason.DEVICE_DOWN
        again = [grant for grant in client.grants if grant.generation == answer.generation]
        others = [
            grant
            for grant in self.grants
            if grant.path == path and grant.lives(self.now_s) and grant not in again
        ]
        assert not others, "two live grants of one key"
        if again:
            (grant,) = again
            assert grant.lives(self.now_s)
            assert grant.extents == answer.extents
            latest_s = grant.since_s + limits.RESERVATION_S_MAX
            grant.deadline_s = max(grant.deadline_s, min(self.now_s + duration_s, latest_s))
            return
        assert answer.generation not in {grant.generation for grant in self.grants}, "a generation is reused"
        assert sum(count for _, count in answer.extents) == self.pages_of(path)
        content = Random(answer.generation).randbytes(self.sizes[path])
        grant = Grant(path, answer.generation, answer.extents, content, self.now_s, self.now_s + duration_s)
        client.grants.append(grant)
        self.grants.append(grant)

    def write(self, who: int, which: int, share: int) -> None:
        """A part of an object's bytes, or late ones, or garbage: a writer may do as it likes with its pages."""
        grants = [grant for grant in self.grants if grant.may_write(self.now_s)]
        if grants:
            grant = grants[which % len(grants)]
            part = (
                Random(share).randbytes(len(grant.content) * (share % 5) // 4) if share % 2 else grant.content
            )
            self.land(grant, part)
        self.settle()

    def land(self, grant: Grant, data: bytes) -> None:
        left = memoryview(data)
        for start, count in grant.extents:
            part = left[: count * PAGE_BYTES]
            self.arena.view(start * PAGE_BYTES, len(part))[:] = part
            left = left[len(part) :]

    def commit(self, who: int, which: int) -> None:
        """All bytes have arrived; the writer says so."""
        client = self.client(who)
        if client.grants:
            grant = client.grants[which % len(client.grants)]
            if grant.may_write(self.now_s) and not grant.ended:
                self.land(grant, grant.content)
            lived = grant.lives(self.now_s)
            was_ready = (
                grant.generation in self.commits
                and grant.path in self.ready | self.down
                and self.generation(grant.path) == grant.generation
            )
            table = checksums(memoryview(grant.content), GEOMETRY.runs(len(grant.content)))
            item = CommitItem(key_of(grant.path), grant.generation, table)
            (answer,) = self.store.commit(client.id, NAMESPACE, [item])
            if lived or was_ready:
                assert answer == Committed()
                tier = self.store.tier_of(key_of(grant.path))
                assert tier is Tier.DRAM or was_ready, "committed, and not to be had at once"
            else:
                assert answer == Stale()
            if lived:
                self.commits[grant.generation] = Commit(grant.path, grant.content)
                self.lost.pop(grant.path, None)
                grant.ended = client.has_committed = True
            elif not grant.ended:
                grant.ended, grant.late_until_s = True, grant.deadline_s + limits.HOLD_S
                self.lost[grant.path] = (
                    MissReason.EXPIRED
                )  # the node notices only now, or `settle` had seen it
        self.settle()

    def commit_of_others(self, who: int, which: int) -> None:
        """Somebody else's reservation, or a made-up one."""
        client = self.client(who)
        others = [grant for grant in self.grants if grant not in client.grants and not grant.ended]
        if others:
            grant = others[which % len(others)]
            table = bytes(8 * GEOMETRY.num_runs)
            for generation in (grant.generation, Generation(bytes(8))):
                item = CommitItem(key_of(grant.path), generation, table)
                assert self.store.commit(client.id, NAMESPACE, [item]) == (Stale(),)
        self.settle()

    def abort_of_others(self, who: int, which: int) -> None:
        """Somebody else's reservation stays."""
        client = self.client(who)
        others = [grant for grant in self.grants if grant not in client.grants and grant.lives(self.now_s)]
        if others:
            grant = others[which % len(others)]
            self.store.abort(client.id, NAMESPACE, [(key_of(grant.path), grant.generation)], True)
        self.settle()

    def abort(self, who: int, which: int, quiet: bool) -> None:
        """Quiet means: no write of mine can land any more."""
        client = self.client(who)
        if client.grants:
            grant = client.grants[which % len(client.grants)]
            quiet = quiet and grant.lives(self.now_s)  # who slept past the deadline does not know
            self.store.abort(client.id, NAMESPACE, [(key_of(grant.path), grant.generation)], quiet)
            if not grant.ended:
                grant.ended = True
                held_until_s = min(self.now_s, grant.deadline_s) + limits.HOLD_S
                grant.late_until_s = 0.0 if quiet else held_until_s
        self.settle()

    # --- readers ----------------------------------------------------------------------------------------

    def acquire(self, who: int, which: int, lease: int, duration_s: float, prefix: bool) -> None:
        client = self.client(who)
        path = PATHS[which % len(PATHS)]
        self.ask(client, [path[: depth + 1] for depth in range(len(path))], lease % 3, duration_s, prefix)
        self.settle()

    def acquire_one(self, client: Client, path: str) -> None:
        """What exists is promised."""
        (answer,) = self.ask(client, [path], 9, 1.0, prefix=True)
        assert isinstance(answer, Resident | OnDisk), f"{path} was said to exist, then {answer}"
        self.store.release(client.id, Release(self.lease_id(9)))
        self.leased = [held for held in self.leased if (held.client, held.name) != (client.id, 9)]
        self.settle()

    def ask(
        self, client: Client, paths: list[str], name: int, duration_s: float, prefix: bool
    ) -> tuple[object, ...]:
        own = [held for held in self.leased if (held.client, held.name) == (client.id, name)]
        mine = {held.path: held for held in own if held.deadline_s > self.now_s}
        since_s = min((held.since_s for held in mine.values()), default=self.now_s)
        leased_pages = self.leased_pages_of(client)
        request = Acquire(
            NAMESPACE,
            tuple(map(key_of, paths)),
            self.lease_id(name),
            duration_s,
            prefix=prefix,
            sealed=is_sealed(name),
        )
        answers = received(self.store.acquire(client.id, request))
        latest_s = since_s + limits.LEASE_S_MAX
        for held in mine.values():
            held.deadline_s = max(held.deadline_s, min(self.now_s + duration_s, latest_s))
        deadline_s = max(
            (held.deadline_s for held in mine.values()), default=min(self.now_s + duration_s, latest_s)
        )
        for path, answer in zip(paths, answers, strict=False):
            match answer:
                case Resident() | OnDisk() if path in mine:
                    self.check_leased(mine[path], answer)
                case Resident() | OnDisk():
                    assert path in self.ready, "what is not committed is promised"
                    assert self.commits[answer.generation].path == path
                    held = Leased(client.id, name, path, answer.generation, None, since_s, deadline_s)
                    self.leased.append(held)
                    self.check_leased(held, answer)
                case Filling():
                    assert self.states().get(path) == "filling"
                case Miss(reason=MissReason.LEASE_LIMIT):
                    assert path in self.ready
                    floor = limits.OBJECTS_PER_CLIENT_MIN * pages_for(
                        SIZES[-1] * GEOMETRY.bytes_per_unit, PAGE_BYTES
                    )
                    entitled = leased_pages + sum(map(self.pages_of, paths)) <= floor
                    assert not (entitled and self.ticked_s == self.now_s), (
                        "refused what every client may lease"
                    )
                case Miss() if path in mine:
                    self.check_leased(mine[path], answer)
                case Miss(reason=MissReason.DEVICE_DOWN) if path in self.down:
                    assert not self.disk.up
                case Miss(reason=reason):
                    assert path not in self.ready, f"{path} is ready, and missed: {reason}"
                    assert reason == self.lost.get(path, MissReason.NEVER_STORED), (
                        path,
                        reason,
                        self.lost.get(path),
                    )
        unanswered = len(paths) - len(answers)
        assert not unanswered or (prefix and not isinstance(answers[-1], Resident | OnDisk))
        self.down_now()
        return answers

    def check_leased(self, held: Leased, answer: object) -> None:
        """What is said of a leased copy: it stays what it was, comes from NVMe, or is a miss for a reason."""
        commit = self.commits[held.generation]
        match answer:
            case Resident():
                assert answer.generation == held.generation
                assert held.resident in (None, answer), "what was promised has changed"
                held.resident = answer
                self.read(held)
            case OnDisk():
                assert held.resident is None, "what was in DRAM is not there any more"
                assert answer.generation == held.generation
                assert self.disk.up
            case Miss(reason=MissReason.BAD_COPY):
                assert commit.flipped or held.generation in self.damaged
            case Miss(reason=MissReason.DEVICE_DOWN):
                assert held.resident is None
                assert self.down_at_s == self.now_s or held.path in self.failed
            case Miss(reason=reason):
                assert held.resident is None
                assert reason in (MissReason.NO_ROOM, MissReason.PROMOTE_DEADLINE)
            case _:
                raise AssertionError(f"{held.path} is leased, and {answer}")

    def read(self, held: Leased) -> None:
        """The bytes are those of one commit of this key, unless the memory is broken; then the table says so."""
        if held.resident is None:
            return
        commit = self.commits[held.generation]
        data = self.bytes_at(held.resident)
        runs = GEOMETRY.runs(held.resident.size_bytes)
        if proves(held.resident.table, checksums(memoryview(data), runs), runs):
            assert data == commit.content, "wrong bytes under a right table"
        else:
            assert commit.flipped, "leased bytes have changed"

    def bytes_at(self, resident: Resident) -> bytes:
        data = b"".join(
            bytes(self.arena.view(start * PAGE_BYTES, count * PAGE_BYTES))
            for start, count in resident.extents
        )
        return data[: resident.size_bytes]

    def renew(self, who: int, lease: int, duration_s: float) -> None:
        client, name = self.client(who), lease % 3
        left_s = self.store.renew(client.id, Renew(self.lease_id(name), duration_s))
        mine = [
            held
            for held in self.leased
            if (held.client, held.name) == (client.id, name) and held.deadline_s > self.now_s
        ]
        assert (left_s > 0) == bool(mine)
        for held in mine:
            assert self.now_s + left_s <= held.since_s + limits.LEASE_S_MAX
            held.deadline_s = self.now_s + left_s
        self.settle()

    def release(self, who: int, lease: int, which: int, some: bool, cold: bool) -> None:
        client, name = self.client(who), lease % 3
        paths = [PATHS[which % len(PATHS)]] if some else []
        self.store.release(client.id, Release(self.lease_id(name), tuple(map(key_of, paths)), cold))
        self.leased = [
            held
            for held in self.leased
            if (held.client, held.name) != (client.id, name) or (paths and held.path not in paths)
        ]
        self.settle()

    def pages(self, which: int) -> None:
        """Where it is now: where it was, or on its way."""
        alive = [held for held in self.leased if held.deadline_s > self.now_s]
        if alive:
            held = alive[which % len(alive)]
            request = Pages(self.lease_id(held.name), (key_of(held.path),), sealed=is_sealed(held.name))
            (answer,) = received(self.store.pages(held.client, request))
            self.check_leased(held, answer)
        self.settle()

    def prefetch(self, which: int) -> None:
        path = PATHS[which % len(PATHS)]
        keys = tuple(key_of(path[: depth + 1]) for depth in range(len(path)))
        self.store.prefetch(self.clients[0].id, Prefetch(NAMESPACE, keys))
        self.settle()

    # --- between tiers ----------------------------------------------------------------------------------

    def carry(self, which: int, failure: MissReason | None) -> None:
        """One job ends, well or not."""
        if self.carrier.jobs:
            job = self.carrier.jobs[which % len(self.carrier.jobs)]
            path = bytes(job.object.key).decode().rstrip(".")
            if isinstance(job, Promotion):
                self.failed.add(path)
                if failure is MissReason.BAD_COPY:
                    self.damaged.add(job.object.generation)
            bad_before = self.store.snapshot().totals.bad_copies
            self.carrier.carry(which, failure if isinstance(job, Promotion) else None)
            if self.store.snapshot().totals.bad_copies > bad_before:
                bad = self.commits[job.object.generation]
                assert bad.flipped or job.object.generation in self.damaged, "a sound copy is said to be bad"
                self.bad.add(path)
        self.settle()

    def carry_all(self) -> None:
        while self.carrier.jobs or self.carrier.landing:
            self.carry(0, None)
            self.land_late()
        self.land_late()

    def land_late(self) -> None:
        """What was given up writes a last time, and ends; the device commits."""
        self.carrier.land()
        self.carrier.commit()
        self.settle()

    def switch(self, up: bool) -> None:
        """The device goes away, or is back."""
        self.disk.up = up
        self.settle()

    def wear(self, worn: bool) -> None:
        self.disk.worn = worn
        self.settle()

    # --- trouble ----------------------------------------------------------------------------------------

    def flip(self, which: int, where: int) -> None:
        """A bit of a leased copy changes in memory."""
        alive = [held for held in self.leased if held.resident and held.deadline_s > self.now_s]
        if alive:
            held = alive[which % len(alive)]
            assert held.resident is not None
            start, _ = held.resident.extents[0]
            at = start * PAGE_BYTES + where % min(PAGE_BYTES, held.resident.size_bytes)
            self.arena.buffer[at] ^= 1
            self.commits[held.generation].flipped = True
        self.settle()

    def suspect(self, which: int) -> None:
        """A reader doubts a copy. The verdict comes later."""
        alive = [held for held in self.leased if held.resident and held.deadline_s > self.now_s]
        if alive:
            held = alive[which % len(alive)]
            request = Suspect(NAMESPACE, key_of(held.path), held.generation, self.lease_id(held.name))
            check = self.store.check(held.client, request)
            assert check is not None or self.commits[held.generation].flipped
            if check is not None:
                self.checks.append(check)
        self.settle()

    def verdict(self, which: int) -> None:
        """The verification ends, whatever happened to leases and keys meanwhile."""
        if self.checks:
            check = self.checks.pop(which % len(self.checks))
            commit = self.commits[check.suspect.generation]
            sound = is_sound(self.arena, check)
            assert sound or commit.flipped, "the bytes changed while they were verified"
            listed = self.generation(commit.path) == check.suspect.generation
            bad_before = self.store.snapshot().totals.bad_copies
            self.store.settle(check, sound=sound)
            if not sound:
                found = self.store.snapshot().totals.bad_copies - bad_before
                self.flips_found += found
                if listed and found:
                    self.lost[commit.path] = MissReason.BAD_COPY
                    assert self.store.tier_of(key_of(commit.path)) is not Tier.DRAM
        self.settle(gone_on_purpose=True)

    def crash(self, who: int) -> None:
        """kill -9: nothing is given back, its last writes may still land, a new process takes its place."""
        self.clients[who % len(self.clients)] = self.new_client()
        self.settle()

    def restart(self) -> None:
        """kill -9 of the node: what its device had is found again, all else is gone, and so is every promise. Writers
        of the earlier boot write nowhere."""
        if not self.disk.up:
            return
        self.disk.commit()
        records = list(self.disk.records.values())
        self.boot()
        self.store.adopt(self.disk, records)
        for grant in self.grants:
            grant.ended, grant.late_until_s = True, 0.0
        for each in self.everybody:
            each.has_committed = False
        for known in (self.leased, self.checks, self.lost, self.failed, self.bad):
            known.clear()
        self.orphaning = 0
        self.settle(gone_on_purpose=True)
        assert {key_of(path) for path in self.ready} == set(self.disk.records), "what was on NVMe is lost"

    def drop(self, which: int) -> None:
        path = PATHS[which % len(PATHS)]
        self.store.drop(ClientId(bytes(16)), Drop(NAMESPACE, (key_of(path),)))
        if path in self.ready or path in self.down:
            self.lost[path] = MissReason.EVICTED
        self.settle(gone_on_purpose=True)

    def wait(self, seconds: float) -> None:
        """Time passes, and the node does not notice yet."""
        self.now_s += seconds
        self.settle()

    def tick(self) -> None:
        self.store.tick()
        self.ticked_s = self.now_s
        use = self.store.snapshot().tiers[Tier.DRAM]
        busy = self.checks or self.carrier.jobs or self.carrier.landing
        if not (use.leased_pages or use.reserved_pages or use.held_pages or busy):
            assert use.free_pages >= int(use.pages * limits.LOW_WATER_SHARE), "below the low-water mark"
        self.settle()

    def end(self) -> None:
        """Everybody stops. Everything held ends by itself, and the store is as good as new."""
        while self.checks:
            self.verdict(0)
        self.switch(up=True)
        self.wear(worn=False)
        self.carry_all()
        self.clients = [self.new_client()]
        for _ in range(3):
            self.wait(max(limits.RESERVATION_S_MAX, limits.LEASE_S_MAX, limits.HOLD_S))
            self.tick()
            self.carry_all()
        snapshot = self.store.snapshot()
        use = snapshot.tiers[Tier.DRAM]
        assert (
            snapshot.leases,
            snapshot.reservations,
            use.held_pages,
            use.reserved_pages,
            use.leased_pages,
        ) == (0,) * 5
        tiers = self.tiers()
        in_dram = [path for path, where in tiers.items() if Tier.DRAM in where]
        assert use.free_pages + sum(map(self.pages_of, in_dram)) == use.pages, "pages have leaked"
        on_disk = [path for path, where in tiers.items() if Tier.NVME in where]
        assert self.disk.free_pages + sum(map(self.pages_of, on_disk)) == self.disk.usable_pages, (
            "pages of the device have leaked"
        )
        for path in [path for path in PATHS if len(path) == 1]:
            self.positive(path)

    def positive(self, path: str) -> None:
        """What fits into an empty store is readable at once after its commit: no promise is kept by never hitting."""
        for _ in range(5):
            self.reserve(0, PATHS.index(path), 1, 30.0, cold=False)
            self.carry_all()
        mine = [grant for grant in self.clients[0].grants if grant.path == path]
        assert mine or path in self.ready, f"{path} was refused by a store with nothing to do"
        if mine:
            self.commit(0, self.clients[0].grants.index(mine[-1]))
        answer: object = None
        for _ in range(5):
            (answer,) = self.ask(self.clients[0], [path], 0, 30.0, prefix=True)
            assert isinstance(answer, Resident | OnDisk)
            self.store.pages(self.clients[0].id, Pages(self.lease_id(0), (key_of(path),)))
            self.carry_all()
        assert isinstance(answer, Resident)
        self.release(0, 0, 0, some=False, cold=False)

    # --- invariants -------------------------------------------------------------------------------------

    def settle(self, *, gone_on_purpose: bool = False) -> None:
        """Looks at what has changed, then at what must hold."""
        states = self.states()
        ready = {path for path, state in states.items() if state == "ready"}
        down = self.down_now()
        vanished = self.ready - ready - down
        if not gone_on_purpose:
            self.check_vanished(vanished, states)
        for path in self.down - ready - down:
            if states.get(path) != "filling":
                self.lost[path] = MissReason.BAD_COPY if path in self.bad else MissReason.EVICTED
        self.bad.clear()
        self.down = down
        for grant in self.grants:
            noticed = states.get(grant.path) != "filling" or self.generation(grant.path) != grant.generation
            if not grant.ended and self.now_s >= grant.deadline_s and noticed:
                grant.ended, grant.late_until_s = True, grant.deadline_s + limits.HOLD_S
                if grant.path not in ready:
                    self.lost[grant.path] = MissReason.EXPIRED
        self.ready = ready
        self.check_invariants()

    def notice_vanished(self) -> None:
        """What was evicted may be granted again from now on."""
        states = self.states()
        ready = {path for path, state in states.items() if state == "ready"}
        vanished = self.ready - ready - self.down_now()
        self.check_vanished(vanished, states)
        self.ready -= vanished

    def check_vanished(self, vanished: set[str], states: dict[str, str]) -> None:
        """What is gone was evicted, children first, or was found bad."""
        orphaning = self.store.snapshot().totals.orphaning
        for path in vanished:
            if path in self.bad:
                self.lost[path] = MissReason.BAD_COPY
                continue
            children = [child for child in states if child[:-1] == path]
            if orphaning == self.orphaning:
                assert not children, f"{path} was evicted while {children} are held"
            tiers = self.tiers()
            assert not any(Tier.DRAM in tiers[child] for child in children), "a child in DRAM is out of reach"
            self.lost[path] = MissReason.EVICTED
        self.orphaning = orphaning

    def down_now(self) -> set[str]:
        return {path for path, state in self.states().items() if state == "down"}

    def check_invariants(self) -> None:
        self.store.audit()
        self.down_at_s = self.down_at_s if self.disk.up else self.now_s
        self.leased = [held for held in self.leased if held.deadline_s > self.now_s]
        owners: dict[int, Generation] = {}
        for held in self.leased:
            self.read(held)
            if held.resident is not None:
                self.own(owners, held.generation, held.resident.extents)
            else:
                self.check_on_disk(held)
        for grant in self.grants:
            if grant.may_write(self.now_s):
                self.own(owners, grant.generation, grant.extents)
            if grant.lives(self.now_s):
                assert self.generation(grant.path) == grant.generation, (
                    f"{grant.path} was taken from its writer"
                )
        for record in self.disk.records.values():
            commit = self.commits[record.generation]
            assert self.disk.data[record] == commit.content, "what is on the device is no commit"
            assert key_of(commit.path) == record.key
        committed = {commit.path for commit in self.commits.values()}
        assert self.ready <= committed, "something is visible that nobody committed"
        self.check_limits()

    def check_on_disk(self, held: Leased) -> None:
        """What is promised on NVMe is there, unless it was found bad."""
        record = self.disk.records.get(key_of(held.path))
        there = record is not None and record.generation == held.generation
        assert there or held.generation in self.damaged or self.commits[held.generation].flipped, (
            f"{held.path} was promised, and is nowhere"
        )

    def own(
        self, owners: dict[int, Generation], generation: Generation, extents: tuple[tuple[int, int], ...]
    ) -> None:
        """Pages that somebody reads, or may write, are nobody else's."""
        for start, count in extents:
            for page in range(start, start + count):
                assert owners.setdefault(page, generation) == generation, f"page {page} is given to two"

    def check_limits(self) -> None:
        use = self.store.snapshot().tiers[Tier.DRAM]
        floor = limits.OBJECTS_PER_CLIENT_MIN * pages_for(SIZES[-1] * GEOMETRY.bytes_per_unit, PAGE_BYTES)
        floors = floor * self.num_clients
        assert use.leased_pages <= use.pages * limits.LEASED_AND_PROMOTED_SHARE_MAX + 2 * floors
        assert use.reserved_pages + use.held_pages <= use.pages * limits.RESERVED_AND_HELD_SHARE_MAX + floors
        if self.num_clients == 1:
            share = (
                limits.LEASED_AND_PROMOTED_SHARE_MAX if self.disk.usable_pages else limits.LEASED_SHARE_MAX
            )
            assert use.leased_pages <= max(use.pages * share, floor) + (
                floor if self.disk.usable_pages else 0
            )
            taken = use.reserved_pages + use.held_pages
            assert taken <= max(use.pages * limits.RESERVED_AND_HELD_SHARE_MAX, floor)

    # --- words ------------------------------------------------------------------------------------------

    def client(self, who: int) -> Client:
        return self.clients[who % len(self.clients)]

    def item(self, path: str, cold: bool) -> ReserveItem:
        parent = key_of(path[:-1]) if path[:-1] else Key(NAMESPACE)
        return ReserveItem(key_of(path), parent, len(path) - 1, self.sizes[path], cold)

    def lease_id(self, name: int) -> LeaseId:
        return LeaseId(name.to_bytes(16, "big"))

    def pages_of(self, path: str) -> int:
        return pages_for(self.sizes[path], PAGE_BYTES)

    def pages_held_by(self, client: Client) -> int:
        """Of reservations and of held pages, as the client would count them; ended late at the latest."""
        return sum(
            self.pages_of(grant.path) for grant in client.grants if grant.generation not in self.commits
        )

    def leased_pages_of(self, client: Client) -> int:
        alive = {held.generation: held for held in self.leased if held.client == client.id}
        return sum(self.pages_of(held.path) for held in alive.values())

    def states(self) -> dict[str, str]:
        """Paths of listed objects: ready (somewhere), filling by a writer, or down with their device."""
        return {path: _state(tiers) for path, tiers in self.tiers().items()}

    def tiers(self) -> dict[str, dict[Tier, str]]:
        views, _ = self.store.objects(1000)
        names = {key_of(path).hex(): path for path in PATHS}
        return {names[view.key]: view.tiers for view in views}

    def generation(self, path: str) -> Generation | None:
        """The generation of the listed object."""
        listed = self.store._listing.objects.get(key_of(path))
        return listed.generation if listed is not None else None


def _state(tiers: dict[Tier, str]) -> str:
    if tiers.get(Tier.DRAM) in ("ready", "moving") or tiers.get(Tier.NVME) == "ready":
        return "ready"
    return "down" if Tier.NVME in tiers else tiers[Tier.DRAM]
