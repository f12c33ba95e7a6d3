"""The store keeps its promises whatever several clients do, in any order, at any time, with any of them dying.

Invariants, checked after every act (tests/sim/model.py), and the mutants that must break each (all were tried):

* pages are conserved (free + held + copies are all there are):
    dram.py: `hold` forgets them; `_free_held` frees twice; pages.py: a neighbour that was merged stays free, too;
* no page is in two copies:
    pages.py: the rest of a cut extent begins one page early; an exact fit stays free; dram.py: what is held is free,
    too; `retire` gives pages back although leased;
* nothing leased is evicted or changes:
    dram.py: `_is_evictable` always; leases.py: a release gives all back; objects.py: `pinned` ignores checks;
* nothing uncommitted is visible, and only its writer makes it so, or gives it up:
    writing.py: any client commits; any client aborts; any generation commits; a commit after the deadline;
* what is read is one commit, of this key:
    writing.py: any client gets the same grant; no hold; every abort is quiet; dram.py: where a copy was is not
    forgotten when it goes;
* no chunk goes while the node holds a child of it:
    dram.py: nothing is spared when room is made; prefix.py: a parent stays queued; objects.py: parents unknown;
* with NVMe: pages of both tiers are conserved, what is promised on NVMe stays there, what is on it is a commit:
    dram.py: `land` frees at once; nvme.py: `_is_evictable` always, pages counted twice; moving.py: the copy in DRAM
    goes when its spill begins, a key is put twice; objects.py: a job does not pin;
* what is on NVMe outlives the node, and nothing else does:
    adopting.py: what is found is not listed, or without its generation; nvme.py: its pages are not counted;
* shares are kept:
    clients.py: no share at all; no floor; leases.py: a lease is prolonged for ever; writing.py: held pages do not
    count;
* everything held ends:
    store.py: `tick` forgets reservations, or leases; dram.py: held pages are never freed;
* what is said to exist is promised, what is committed is readable at once, and a miss says why:
    reading.py: always miss; writing.py: Exists without a look at the share; listing.py: evictions are not remembered.
"""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvstore.core import MissReason
from kvstore.store import SpillMode, Store
from tests.sim.model import PATHS, SIZES, Sim
from tests.support.always_miss import never_hit

ARENAS = [6, 7, 12, 20, 40]
"""Pages: two chunks and up, so that the store is full most of the time. Times below are exact in binary."""
DISKS = [0, 6, 12, 40]
"""Pages of the NVMe tier; 0: there is none."""
FAILURES = [None, None, None, MissReason.DEVICE_DOWN, MissReason.PROMOTE_DEADLINE, MissReason.BAD_COPY]
DURATIONS = [0.5, 10.0, 30.0, 120.0]
WAITS = [0.0, 0.5, 5.0, 9.75, 10.0, 30.0, 60.0, 119.75, 120.0]

whos = st.integers(0, 2)
picks = st.integers(0, 15)
durations = st.sampled_from(DURATIONS)
flags = st.booleans()


class StoreMachine(RuleBasedStateMachine):
    """The acts as rules; Hypothesis finds and shrinks."""

    @initialize(
        pages=st.sampled_from(ARENAS),
        sizes=st.lists(st.integers(0, len(SIZES) - 1), min_size=len(PATHS), max_size=len(PATHS)),
        num_clients=st.integers(1, 3),
        disk_pages=st.sampled_from(DISKS),
        spill=st.sampled_from(SpillMode),
    )
    def start(
        self, pages: int, sizes: list[int], num_clients: int, disk_pages: int, spill: SpillMode
    ) -> None:
        self.sim = Sim(pages, sizes, num_clients, disk_pages, spill)

    @rule(who=whos, which=picks, how_many=st.integers(1, 4), duration_s=durations, cold=flags)
    def reserve(self, **arguments) -> None:
        self.sim.reserve(**arguments)

    @rule(who=whos, which=picks, duration_s=durations)
    def put(self, who: int, which: int, duration_s: float) -> None:
        """All of a chain, from reservation to commit, as most do it."""
        self.sim.put(who, which, duration_s)

    @rule(who=whos, which=picks, share=picks)
    def write(self, **arguments) -> None:
        self.sim.write(**arguments)

    @rule(who=whos, which=picks)
    def commit(self, **arguments) -> None:
        self.sim.commit(**arguments)

    @rule(who=whos, which=picks)
    def commit_of_others(self, **arguments) -> None:
        self.sim.commit_of_others(**arguments)

    @rule(who=whos, which=picks)
    def abort_of_others(self, **arguments) -> None:
        self.sim.abort_of_others(**arguments)

    @rule(who=whos, which=picks, quiet=flags)
    def abort(self, **arguments) -> None:
        self.sim.abort(**arguments)

    @rule(who=whos, which=picks, lease=picks, duration_s=durations, prefix=flags)
    def acquire(self, **arguments) -> None:
        self.sim.acquire(**arguments)

    @rule(who=whos, lease=picks, duration_s=durations)
    def renew(self, **arguments) -> None:
        self.sim.renew(**arguments)

    @rule(who=whos, lease=picks, which=picks, some=flags, cold=flags)
    def release(self, **arguments) -> None:
        self.sim.release(**arguments)

    @rule(which=picks)
    def pages(self, **arguments) -> None:
        self.sim.pages(**arguments)

    @rule(which=picks, where=st.integers(0, 4095))
    def flip(self, **arguments) -> None:
        self.sim.flip(**arguments)

    @rule(which=picks)
    def suspect(self, **arguments) -> None:
        self.sim.suspect(**arguments)

    @rule(which=picks)
    def verdict(self, **arguments) -> None:
        self.sim.verdict(**arguments)

    @rule(which=picks)
    def prefetch(self, **arguments) -> None:
        self.sim.prefetch(**arguments)

    @rule(which=picks, failure=st.sampled_from(FAILURES))
    def carry(self, **arguments) -> None:
        self.sim.carry(**arguments)

    @rule()
    def land_late(self) -> None:
        self.sim.land_late()

    @rule(up=flags)
    def switch(self, **arguments) -> None:
        self.sim.switch(**arguments)

    @rule(worn=flags)
    def wear(self, **arguments) -> None:
        self.sim.wear(**arguments)

    @rule(who=whos)
    def crash(self, **arguments) -> None:
        self.sim.crash(**arguments)

    @rule()
    def restart(self) -> None:
        self.sim.restart()

    @rule(which=picks)
    def drop(self, **arguments) -> None:
        self.sim.drop(**arguments)

    @rule(seconds=st.sampled_from(WAITS))
    def wait(self, seconds: float) -> None:
        self.sim.wait(seconds)

    @rule()
    def tick(self) -> None:
        self.sim.tick()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.end()
            self.sim.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("seed", range(60))
def test_a_long_walk(seed: int) -> None:
    """Every rule switched on, weighted as clients would: reaches full stores that short examples do not."""
    random = Random(seed)
    sizes = [random.randrange(len(SIZES)) for _ in PATHS]
    disk_pages = DISKS[seed % len(DISKS)]
    spill = random.choice([SpillMode.EVICT, SpillMode.EVICT, SpillMode.EAGER, SpillMode.NEVER])
    sim = Sim(random.choice(ARENAS), sizes, random.choice([1, 2, 3]), disk_pages, spill)
    acts = {
        "put": (6, lambda: sim.put(pick(), pick(), duration())),
        "reserve": (
            4,
            lambda: sim.reserve(pick(), pick(), random.randint(1, 4), duration(), random.random() < 0.3),
        ),
        "write": (2, lambda: sim.write(pick(), pick(), pick())),
        "commit": (3, lambda: sim.commit(pick(), pick())),
        "commit_of_others": (1, lambda: sim.commit_of_others(pick(), pick())),
        "abort_of_others": (1, lambda: sim.abort_of_others(pick(), pick())),
        "abort": (2, lambda: sim.abort(pick(), pick(), random.random() < 0.5)),
        "acquire": (6, lambda: sim.acquire(pick(), pick(), pick(), duration(), random.random() < 0.7)),
        "renew": (1, lambda: sim.renew(pick(), pick(), duration())),
        "release": (
            3,
            lambda: sim.release(pick(), pick(), pick(), random.random() < 0.3, random.random() < 0.3),
        ),
        "pages": (4, lambda: sim.pages(pick())),
        "flip": (0.3, lambda: sim.flip(pick(), random.randrange(4096))),
        "suspect": (1, lambda: sim.suspect(pick())),
        "verdict": (1.5, lambda: sim.verdict(pick())),
        "prefetch": (1, lambda: sim.prefetch(pick())),
        "carry": (8, lambda: sim.carry(pick(), random.choice([None] * 6 + FAILURES))),
        "land_late": (2, sim.land_late),
        "switch": (1, lambda: sim.switch(random.random() < 0.7)),
        "wear": (0.5, lambda: sim.wear(random.random() < 0.3)),
        "crash": (0.5, lambda: sim.crash(pick())),
        "restart": (0.3, sim.restart),
        "drop": (0.5, lambda: sim.drop(pick())),
        "wait": (3, lambda: sim.wait(random.choice(WAITS[: random.randint(1, len(WAITS))]))),
        "tick": (3, sim.tick),
    }

    def pick() -> int:
        return random.randrange(16)

    def duration() -> float:
        return random.choice(DURATIONS)

    weights = [weight for weight, _ in acts.values()]
    for _, act in random.choices(list(acts.values()), weights, k=300):
        act()
    sim.end()
    sim.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_always_misses_is_found_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "acquire", Store.acquire)  # as it is, afterwards
    never_hit()
    with pytest.raises(AssertionError):
        test_a_long_walk(seed)


def test_what_is_held_counts_as_much_as_what_is_being_filled() -> None:
    """Writers that give up noisily, and have nothing reserved any more. Mutant: writing.py: held pages do not count;
    random walks hardly ever come to the bound of all together, beyond each client's own."""
    sim = Sim(64, [SIZES.index(40)] * len(PATHS), num_clients=3)
    for who, path in enumerate("stu"):
        sim.put(who, PATHS.index(path), 30.0)
    before = len(sim.grants)
    for turn in range(9):
        sim.reserve(turn % 3, turn, 1, 30.0, cold=False)
        sim.abort(turn % 3, -1, quiet=False)
    assert len(sim.grants) - before == 6, "six objects of three pages are what 30 % of the arena has room for"
    sim.end()
    sim.close()
