"""Objects and their life; the only room that changes state."""

from kvstore.store.mover import Mover, is_sound
from kvstore.store.reading import Check
from kvstore.store.reports import ReportLog, ReportView
from kvstore.store.snapshot import ObjectView, Snapshot, TierUse, Totals
from kvstore.store.store import Store

__all__ = [
    "Check",
    "Mover",
    "ObjectView",
    "ReportLog",
    "ReportView",
    "Snapshot",
    "Store",
    "TierUse",
    "Totals",
    "is_sound",
]
