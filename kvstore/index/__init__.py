"""Where keys are: one short contract, Redis and an in-process twin; publishing, and which nodes are alive."""

from kvstore.index.address import parse as parse_url
from kvstore.index.base import Index, Location, NodeRecord
from kvstore.index.in_process import InProcessIndex
from kvstore.index.membership import Membership
from kvstore.index.publisher import Publisher, PublisherStats
from kvstore.index.redis import RedisIndex

__all__ = [
    "Index",
    "InProcessIndex",
    "Location",
    "Membership",
    "NodeRecord",
    "Publisher",
    "PublisherStats",
    "RedisIndex",
    "parse_url",
]
