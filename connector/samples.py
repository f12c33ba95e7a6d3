"""What a load tells of how fast bytes come, by node and tier."""

from collections.abc import Sequence
from typing import NamedTuple

from connector.control import Promised
from connector.cost import Place
from connector.metadata import LoadReport
from kvstore.core import Tier


class Sample(NamedTuple):
    """So many bytes came from there in so much time."""

    place: Place
    size_bytes: int
    seconds: float


def samples_of(objects: Sequence[Promised], reports: Sequence[LoadReport]) -> list[Sample]:
    """The samples in one load; its objects as they were promised, and the reports of all ranks.

    A node's objects on NVMe come behind those in DRAM, so their time begins when those were there. What did not come
    tells nothing: nodes that move no bytes are the business of `connector.paths`.
    """
    valid = min(report.valid for report in reports)
    if any(len(report.ends_s) < valid for report in reports):
        return []
    sizes: dict[Place, int] = {}
    ends_s: dict[Place, float] = {}
    for position, promised in enumerate(objects[:valid]):
        place = Place(promised.node.node, promised.tier)
        sizes[place] = sizes.get(place, 0) + promised.size_bytes
        end_s = max(report.ends_s[position] for report in reports)
        ends_s[place] = max(ends_s.get(place, 0.0), end_s)
    return [
        Sample(place, size, ends_s[place] - ends_s.get(Place(place.node, Tier.DRAM), 0.0))
        if place.tier is Tier.NVME
        else Sample(place, size, ends_s[place])
        for place, size in sizes.items()
    ]
