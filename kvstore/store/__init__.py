"""Objects and their life; the only room that changes state."""

from kvstore.store.mover import Mover
from kvstore.store.snapshot import ObjectView, Snapshot, TierUse, Totals
from kvstore.store.store import Store

__all__ = ["Mover", "ObjectView", "Snapshot", "Store", "TierUse", "Totals"]
