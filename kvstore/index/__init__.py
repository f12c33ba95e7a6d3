"""Where keys are: one short contract, Redis and an in-process twin."""

from kvstore.index.base import Index, Location, NodeRecord

__all__ = ["Index", "Location", "NodeRecord"]
