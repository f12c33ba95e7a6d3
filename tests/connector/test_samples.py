"""What a load tells of how fast bytes come."""

from connector.control import Promised
from connector.cost import Place
from connector.metadata import LoadReport
from connector.samples import Sample, samples_of
from kvstore.client import NodeAddress, NodeId
from kvstore.core import Key, MissReason, Tier
from kvstore.wire import BootId

ONE, TWO = NodeId(b"node-one"), NodeId(b"node-two")


def promised(size_bytes: int, tier: Tier = Tier.DRAM, node: NodeId = ONE) -> Promised:
    address = NodeAddress(node, BootId(b"boot0001"), "x:1", {}, 0, 4096)
    return Promised(Key(bytes(32)), address, b"g", (), size_bytes, b"", tier)


def report(*ends_s: float, valid: int | None = None) -> LoadReport:
    count = len(ends_s) if valid is None else valid
    return LoadReport(count, MissReason.NODE_DOWN, ends_s=ends_s)


def test_the_slowest_rank_says_how_long_it_took() -> None:
    objects = [promised(10), promised(20)]
    assert samples_of(objects, [report(1.0, 2.0), report(1.5, 4.0)]) == [
        Sample(Place(ONE, Tier.DRAM), 30, 4.0)
    ]


def test_nodes_are_told_apart_and_read_side_by_side() -> None:
    objects = [promised(10), promised(20, node=TWO), promised(10)]
    assert samples_of(objects, [report(1.0, 5.0, 2.0)]) == [
        Sample(Place(ONE, Tier.DRAM), 20, 2.0),
        Sample(Place(TWO, Tier.DRAM), 20, 5.0),
    ]


def test_the_time_of_nvme_begins_where_that_of_dram_ends() -> None:
    """Mutant: both from the beginning: two tiers of one speed, and the model adds them up."""
    objects = [promised(10), promised(10), promised(30, Tier.NVME), promised(30, Tier.NVME, TWO)]
    assert samples_of(objects, [report(1.0, 2.0, 8.0, 9.0)]) == [
        Sample(Place(ONE, Tier.DRAM), 20, 2.0),
        Sample(Place(ONE, Tier.NVME), 30, 6.0),
        Sample(Place(TWO, Tier.NVME), 30, 9.0),
    ]


def test_what_did_not_come_tells_nothing() -> None:
    objects = [promised(10), promised(20), promised(30)]
    assert samples_of(objects, [report(1.0, 2.0, 3.0), report(1.0)]) == [
        Sample(Place(ONE, Tier.DRAM), 10, 1.0)
    ]
    assert samples_of(objects, [report()]) == []
    assert samples_of(objects, [report(valid=3)]) == []  # a rank that does not say when
