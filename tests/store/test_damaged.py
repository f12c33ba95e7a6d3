"""A copy on a device that a scrub found to be bad, in virtual time: it goes, and nothing else does.

Mutants that must fail here: the copy in DRAM goes with it; a copy goes while a reader leases it; a newer copy of the
key goes in its stead; it stays listed.
"""

import msgspec

from kvstore.core import MissReason, Tier
from kvstore.wire import Miss, OnDisk
from tests.store.test_tiers import spilled_world
from tests.store.world import BOB, key_of


def test_a_damaged_copy_goes_and_a_copy_in_dram_stays() -> None:
    world = spilled_world()
    (disk,) = world.disks
    assert world.where("abcdefgh") == "nnnnbbbb"
    for number, name in enumerate("dh", start=1):
        world.store.damaged(disk.records[key_of(name)])
        world.store.audit()
        assert world.totals.bad_copies == number
    assert world.where("abcdefgh") == "nnn-bbbd"
    assert world.store.tier_of(key_of("h")) is Tier.DRAM
    assert key_of("d") in world.dirty, "the index is to forget it"
    assert key_of("d") not in disk.records and key_of("h") not in disk.records
    assert world.acquire(BOB, "d") == [Miss(MissReason.BAD_COPY)]


def test_what_is_leased_is_left_to_its_reader() -> None:
    world = spilled_world()
    (disk,) = world.disks
    assert isinstance(world.acquire(BOB, "a")[0], OnDisk)
    world.store.damaged(disk.records[key_of("a")])
    world.store.audit()
    assert key_of("a") in disk.records
    assert world.totals.bad_copies == 0
    world.release(BOB)
    world.carry()
    world.store.damaged(disk.records[key_of("a")])
    assert world.totals.bad_copies == 1


def test_an_earlier_copy_of_the_key_is_nobodys() -> None:
    world = spilled_world()
    (disk,) = world.disks
    record = disk.records[key_of("a")]
    world.store.damaged(msgspec.structs.replace(record))
    world.store.damaged(msgspec.structs.replace(record, key=key_of("never")))
    assert world.where("a") == "n"
    assert world.totals.bad_copies == 0
