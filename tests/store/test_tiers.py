"""Two tiers in virtual time: what leaves DRAM is on NVMe first, and comes back when it is asked for.

Mutants that must fail here: the copy in DRAM goes when its spill begins; Reserve waits for, or gives up, what is only
in DRAM; a promotion that failed frees its pages at once; a lease does not keep the copy on NVMe; Exists is not said
of what is on NVMe; what Pages asks for starts in another order.
"""

import pytest

from kvstore.core import Key, MissReason, Tier, checksums
from kvstore.policy import PrefixLru
from kvstore.store import SpillMode, Store, Tiering
from kvstore.wire import Exists, Granted, Miss, OnDisk, Pages, Prefetch, Refused, Resident, Suspect
from tests.store.world import (
    ANN,
    BOB,
    CAT,
    CHUNK_BYTES,
    CHUNK_PAGES,
    MANIFEST,
    NAMESPACE,
    PAGE_BYTES,
    World,
    items,
    key_of,
    lease_of,
)
from tests.support.disks import Carrier, MemoryDisk, MemoryDisks

ZEROS = checksums(memoryview(bytes(CHUNK_BYTES)), MANIFEST.geometry.runs(CHUNK_BYTES))
ROOM = 4  # chunks in DRAM
BEYOND = 100.0


class Tiers(World):
    """A world with an NVMe tier."""

    def __init__(
        self, chunks: int = ROOM, disk_chunks: int = 20, spill: SpillMode = SpillMode.EVICT, disks: int = 1
    ) -> None:
        self.disks = [MemoryDisk(disk_chunks * CHUNK_PAGES, PAGE_BYTES) for _ in range(disks)]
        self.now_s = 1000.0
        tier = MemoryDisks(*self.disks)
        self.store = Store(
            chunks * CHUNK_PAGES, PAGE_BYTES, PrefixLru(), lambda: self.now_s, tiering=Tiering(tier, spill)
        )
        self.carrier = Carrier(self.store, tier)
        self.advice = self.store.open_namespace(NAMESPACE, MANIFEST.encode())
        self.dirty: list[Key] = []
        self.store.on_dirty = self.dirty.append

    def put_all(self, names: str) -> None:
        """Stores a chain, one object at a time, waiting for room where there is none."""
        for at in range(len(names)):
            self.put_at(names, at)

    def put_at(self, names: str, at: int) -> None:
        grant: object = None
        for _ in range(100):
            (grant,) = self.store.reserve(ANN, NAMESPACE, items(names)[at : at + 1], 30.0)
            if not isinstance(grant, Refused):
                break
            self.carry()
            self.after(0.1)
        assert isinstance(grant, Granted), f"{names[at]}: {grant}"
        self.commit(ANN, {names[at]: grant}, ZEROS)
        self.after(0.1)

    def put_all_of(self, names: str) -> None:
        """Stores the last object of a chain whose others are there."""
        self.put_at(names, len(names) - 1)

    def carry(self) -> None:
        self.carrier.all()
        self.store.audit()

    def pages(self, names: str, lease: str = "lease", since_s: float | None = None) -> list[object]:
        answers = self.store.pages(BOB, Pages(lease_of(lease), tuple(map(key_of, names))), since_s)
        self.store.audit()
        return list(answers)

    def where(self, names: str) -> str:
        """d: DRAM, n: NVMe, b: both, -: neither, ~: on its way."""
        views = {view.key: view.tiers for view in self.store.objects(1000)[0]}
        return "".join(_letter(views.get(key_of(name).hex(), {})) for name in names)

    @property
    def totals(self):
        return self.store.snapshot().totals


def _letter(tiers: dict[Tier, str]) -> str:
    dram, nvme = tiers.get(Tier.DRAM), tiers.get(Tier.NVME)
    if dram in ("filling", "moving"):
        return "~"
    return {(False, False): "-", (True, False): "d", (False, True): "n", (True, True): "b"}[
        bool(dram), bool(nvme)
    ]


def spilled_world(spill: SpillMode = SpillMode.EAGER, **arguments) -> Tiers:
    """a to h were stored; all of them are somewhere, and what is in DRAM is on NVMe, too."""
    world = Tiers(spill=spill, **arguments)
    world.put_all("abcdefgh")
    world.carry()
    return world


def test_what_dram_has_no_room_for_is_on_nvme() -> None:
    world = spilled_world(SpillMode.EVICT)
    assert set(world.where("abcdefgh")) <= set("dnb")
    assert world.totals.evicted == 0
    assert world.totals.committed == 8
    tiers = world.store.snapshot().tiers
    assert tiers[Tier.NVME].objects == world.where("abcdefgh").count("n") + world.where("abcdefgh").count("b")
    for name in "abcdefgh":
        assert world.store.tier_of(key_of(name)) is not None


def test_reserve_never_waits_and_gives_up_nothing_that_is_only_in_dram() -> None:
    world = Tiers()
    for name in "abcd":
        world.put(ANN, name)
    (answer,) = world.reserve(ANN, "e")
    assert answer == Refused(MissReason.NO_ROOM)
    assert world.where("abcd") == "~ddd", "the least recently used one is on its way"
    assert [world.store.tier_of(key_of(name)) for name in "abcd"] == [Tier.DRAM] * 4
    world.carrier = Carrier(world.store, MemoryDisks(*world.disks))
    assert world.totals.evicted == 0


def test_a_spill_that_is_used_meanwhile_stays_in_dram() -> None:
    world = Tiers()
    for name in "abcd":
        grants = dict(zip(name, world.reserve(ANN, name), strict=True))
        world.commit(ANN, grants, ZEROS)
    assert world.reserve(ANN, "e") == [Refused(MissReason.NO_ROOM)]
    assert isinstance(world.acquire(BOB, "a")[0], Resident)
    world.release(BOB)
    world.carry()
    assert world.where("abcd") == "bddd"
    assert world.totals.spilled == 1
    assert world.totals.demoted == 0


def test_what_is_clean_makes_room_at_once() -> None:
    world = Tiers(spill=SpillMode.EAGER)
    for name in "abcd":
        world.commit(ANN, dict(zip(name, world.reserve(ANN, name), strict=True)), ZEROS)
        world.carry()
    assert world.where("abcd") == "bbbb"
    assert isinstance(world.reserve(ANN, "e")[0], Granted)
    assert world.where("abcd") == "nbbb"


def test_never_spills_nothing() -> None:
    world = Tiers(spill=SpillMode.NEVER)
    for name in "abcde":
        world.put(ANN, name)
    assert world.where("abcde") == "-dddd"
    assert world.carrier.jobs == []
    assert world.totals.evicted == 1


def test_acquire_leases_what_is_on_nvme_and_goes_on_over_it() -> None:
    world = spilled_world()
    answers = world.acquire(BOB, "abcdef")
    assert len(answers) == 6
    assert {type(answer) for answer in answers} <= {Resident, OnDisk}
    first = next(answer for answer in answers if isinstance(answer, OnDisk))
    assert first.size_bytes == CHUNK_BYTES
    etas = [answer.eta_s for answer in answers if isinstance(answer, OnDisk)]
    assert etas == sorted(etas)
    assert etas[0] > 0
    assert not world.carrier.jobs, "nothing is promoted that nobody asked the pages of"


def test_what_is_on_nvme_exists() -> None:
    world = spilled_world()
    on_disk = [name for name in "abcdefgh" if world.where(name) == "n"]
    assert on_disk
    assert world.reserve(CAT, on_disk[0]) == [Exists()]


def test_a_prompt_larger_than_dram_streams_through_it_in_order() -> None:
    world = spilled_world()
    left = "abcdefgh"
    assert len(world.acquire(BOB, left)) == 8
    seen = ""
    for _ in range(50):
        answers = world.pages(left)
        ready = next((at for at, each in enumerate(answers) if not isinstance(each, Resident)), len(answers))
        seen += left[:ready]
        if ready:
            world.release(BOB, names=left[:ready])
        left = left[ready:]
        if not left:
            break
        world.carry()
    assert seen == "abcdefgh"
    assert world.totals.promoted >= 8 - ROOM
    assert world.totals.evicted == 0


def test_single_flight_whoever_asks() -> None:
    world = spilled_world()
    name = next(name for name in "abcdefgh" if world.where(name) == "n")
    world.acquire(BOB, name)
    world.acquire(CAT, name, "other")
    world.pages(name)
    world.store.pages(CAT, Pages(lease_of("other"), (key_of(name),)))
    world.store.prefetch(CAT, Prefetch(NAMESPACE, (key_of(name),)))
    assert len(world.carrier.jobs) == 1


def test_a_lease_keeps_the_copy_on_nvme() -> None:
    """The tier is full of leased objects: what is spilled then finds no room, and is given up instead of them."""
    world = spilled_world(disk_chunks=6)
    held = [name for name in "abcdefgh" if world.where(name) == "n"][:2]
    for at, name in enumerate(held):
        assert isinstance(world.acquire(BOB, name, f"l{at}", duration_s=BEYOND)[0], OnDisk)
    world.put_all("stuvwxyz")
    world.carry()
    assert all(world.where(name) in "nb" for name in held)
    assert world.totals.evicted > 0


@pytest.mark.parametrize(
    "failure", [MissReason.DEVICE_DOWN, MissReason.PROMOTE_DEADLINE, MissReason.BAD_COPY]
)
def test_a_promotion_that_fails_says_why_and_holds_its_pages_until_it_has_ended(failure) -> None:
    world = spilled_world()
    name = next(name for name in "abcdefgh" if world.where(name) == "n")
    world.acquire(BOB, name)
    since_s = world.now_s
    assert isinstance(world.pages(name)[0], OnDisk)
    free_pages = world.free_pages
    world.carrier.carry(failure=failure)
    world.store.audit()
    assert world.pages(name, since_s=since_s) == [Miss(failure)]
    assert world.free_pages <= free_pages, "a device may still write there"
    world.carrier.land()
    assert world.free_pages == free_pages + CHUNK_PAGES
    if failure is MissReason.BAD_COPY:
        assert world.where(name) == "-"
        world.release(BOB)
        assert world.acquire(CAT, name) == [Miss(MissReason.BAD_COPY)]
        assert isinstance(world.reserve(ANN, name)[0], Granted), "it may be stored anew"
    else:
        world.now_s += 1
        assert isinstance(world.pages(name)[0], OnDisk), "asked again, it is tried again"
        world.carry()
        assert isinstance(world.pages(name)[0], Resident)


def test_a_device_that_is_down_costs_its_objects_and_nothing_else() -> None:
    world = spilled_world()
    on_disk = [name for name in "abcdefgh" if world.where(name) == "n"]
    world.disks[0].up = False
    assert world.acquire(BOB, on_disk[:1]) == [Miss(MissReason.DEVICE_DOWN)]
    assert world.store.tier_of(key_of(on_disk[0])) is None
    assert isinstance(world.reserve(ANN, on_disk[0])[0], Granted), "it may be stored anew meanwhile"
    for name in "uvwxyz":
        world.put(ANN, name)
    assert not world.carrier.jobs
    world.disks[0].up = True
    if len(on_disk) > 1:
        assert isinstance(world.acquire(BOB, on_disk[1:2])[0], OnDisk)


def test_of_two_devices_one_is_down_and_the_other_goes_on() -> None:
    """What is on it is had, and what is new is written to it, also when it is full.

    Mutant: no room is made where what is given up first lay on the other one.
    """
    world = Tiers(spill=SpillMode.EAGER, disks=2, disk_chunks=8)
    old = "abcdefghijklmnop"
    for name in old:
        world.put_at(name, 0)
        world.carry()
    down, up = world.disks
    assert [len(disk.records) for disk in (down, up)] == [8, 8]
    down.up = False
    for name in old:
        answer = world.acquire(BOB, name, lease=name)[0]
        assert isinstance(answer, OnDisk | Resident) == (
            key_of(name) in up.records or world.where(name) in "db"
        )
        world.release(BOB, name)
    spilled, evicted = world.totals.spilled, world.totals.evicted
    for name in "qrstuvwxyz":
        world.put_at(name, 0)
        world.carry()
    assert world.totals.spilled - spilled == 10
    assert world.where("qrstuvwxyz").count("-") <= 2, (
        "what was written to the full device made way for the next"
    )
    assert world.totals.evicted > evicted
    down.up = True
    back = [name for name in old if key_of(name) in down.records and world.where(name) == "n"]
    assert all(isinstance(world.acquire(BOB, name, lease=name)[0], OnDisk) for name in back)


def test_a_device_that_goes_while_it_is_promised_is_a_miss_that_says_so() -> None:
    world = spilled_world()
    name = next(name for name in "abcdefgh" if world.where(name) == "n")
    world.acquire(BOB, name)
    world.disks[0].up = False
    assert world.pages(name) == [Miss(MissReason.DEVICE_DOWN)]


def test_a_worn_device_is_read_and_not_written() -> None:
    world = spilled_world()
    world.disks[0].worn = True
    spilled = world.totals.spilled
    for name in "uvwxyz":
        world.put(ANN, name)
    assert world.totals.spilled == spilled
    name = next(name for name in "abcdefgh" if world.where(name) == "n")
    world.acquire(BOB, name)
    world.pages(name)
    world.carry()
    assert isinstance(world.pages(name)[0], Resident)


def test_drop_removes_both_copies() -> None:
    world = Tiers(spill=SpillMode.EAGER)
    world.commit(ANN, dict(zip("a", world.reserve(ANN, "a"), strict=True)), ZEROS)
    world.carry()
    assert world.where("a") == "b"
    world.drop("a")
    world.carrier.commit()
    assert world.where("a") == "-"
    assert world.disks[0].records == {}
    assert world.disks[0].free_pages == world.disks[0].usable_pages
    assert world.acquire(BOB, "a") == [Miss(MissReason.EVICTED)]


def test_a_chain_whose_end_is_leased_is_flushed_as_well() -> None:
    """A reader's last release was lost, or it reads still, when the node is told to stop."""
    world = Tiers(spill=SpillMode.EVICT)
    world.put_all("abcd")
    world.acquire(BOB, "d", lease="lost")
    world.store.reserve(ANN, NAMESPACE, items("x"), 30.0)  # no room; the plan met what is leased
    assert world.where("abcd") == "dddd"
    while world.store.moving.unsaved():
        world.store.moving.flush()
        assert len(world.store.moving)
        world.carry()
    assert world.where("abcd") == "bbbb"


def test_a_dropped_key_is_not_put_twice_on_a_device() -> None:
    """The dropped object is still leased, so its copy is still there when the new one is to be spilled."""
    world = Tiers(spill=SpillMode.EAGER)
    world.commit(ANN, dict(zip("a", world.reserve(ANN, "a"), strict=True)), ZEROS)
    world.carry()
    world.acquire(BOB, "a")
    world.drop("a")
    world.commit(ANN, dict(zip("a", world.reserve(ANN, "a"), strict=True)), ZEROS)
    world.carry()
    assert world.where("a") == "d"
    world.release(BOB)
    world.carry()
    assert world.disks[0].records == {}


def test_a_parent_on_nvme_stays_while_its_child_is_in_dram() -> None:
    """Mutant: `Nvme._is_evictable` does not ask for children in DRAM."""
    world = Tiers(disk_chunks=2)
    world.put_all("a")
    for name in "stuv":
        world.put_all(name)
    assert world.where("a") == "n"
    world.put_all_of("ab")
    assert isinstance(world.acquire(BOB, "b", duration_s=BEYOND)[0], Resident)
    for name in "klmnopq":
        world.put_all(name)
    assert world.where("ab") == "nd"
    assert world.totals.evicted > 0


def test_prefetch_promotes_without_a_lease_and_evicts_nothing_leased() -> None:
    world = spilled_world()
    names = [name for name in "abcdefgh" if world.where(name) == "n"]
    world.store.prefetch(BOB, Prefetch(NAMESPACE, tuple(map(key_of, names))))
    world.carry()
    assert world.totals.promoted > 0
    assert world.where(names[0]) == "b"


def test_what_a_device_had_is_found_again() -> None:
    world = spilled_world()
    disk = world.disks[0]
    before = set(disk.records)
    again = Tiers()
    again.disks[0].records, again.disks[0].data, again.disks[0].manifests = (
        disk.records,
        disk.data,
        disk.manifests,
    )
    again.store = Store(
        ROOM * CHUNK_PAGES, PAGE_BYTES, PrefixLru(), lambda: 0.0, tiering=Tiering(MemoryDisks(*again.disks))
    )
    again.store.adopt(again.disks[0], list(disk.records.values()))
    again.store.audit()
    assert set(again.store.keys()) == before
    assert again.totals.found == len(before)


def test_objects_of_an_unknown_namespace_wait_for_its_manifest_and_go_first() -> None:
    world = spilled_world(disk_chunks=6)
    disk = world.disks[0]
    records = list(disk.records.values())
    again = Tiers(disk_chunks=6)
    again.disks[0].records, again.disks[0].data = disk.records, disk.data
    again.store = Store(
        ROOM * CHUNK_PAGES,
        PAGE_BYTES,
        PrefixLru(),
        lambda: again.now_s,
        tiering=Tiering(MemoryDisks(*again.disks)),
    )
    again.disks[0].manifests = {}
    again.store.adopt(again.disks[0], records)
    assert list(again.store.keys()) == []
    again.store.open_namespace(NAMESPACE, MANIFEST.encode())
    again.store.audit()
    assert set(again.store.keys()) == {record.key for record in records}


def test_a_bad_copy_in_dram_leaves_the_one_on_nvme() -> None:
    world = Tiers(spill=SpillMode.EAGER)
    world.commit(ANN, dict(zip("a", world.reserve(ANN, "a"), strict=True)), ZEROS)
    world.carry()
    (resident,) = world.acquire(BOB, "a")
    assert isinstance(resident, Resident)
    check = world.store.check(BOB, Suspect(NAMESPACE, key_of("a"), resident.generation, lease_of("lease")))
    assert check is not None
    world.store.settle(check, sound=False)
    world.store.audit()
    assert world.pages("a") == [Miss(MissReason.BAD_COPY)], "who had the bad one knows"
    assert isinstance(world.acquire(CAT, "a", "new")[0], OnDisk)
