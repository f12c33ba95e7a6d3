"""Bytes at rest: the DRAM arena and the pages of a tier."""

from kvstore.tiers.arena import Arena
from kvstore.tiers.pages import PageAllocator

__all__ = ["Arena", "PageAllocator"]
