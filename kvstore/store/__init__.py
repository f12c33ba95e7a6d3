"""Objects and their life; the only room that changes state."""

from kvstore.store.mover import Mover, is_sound
from kvstore.store.moving import SpillMode, Tiering
from kvstore.store.objects import Job, OnDevice, Promotion, Spill
from kvstore.store.porter import Porter
from kvstore.store.reading import Check, GivenBack
from kvstore.store.reports import ReportLog, ReportView
from kvstore.store.snapshot import ObjectView, Snapshot, TierUse, Totals
from kvstore.store.steps import Steps, in_one_go
from kvstore.store.store import Store

__all__ = [
    "Check",
    "GivenBack",
    "Job",
    "Mover",
    "ObjectView",
    "OnDevice",
    "Porter",
    "Promotion",
    "ReportLog",
    "ReportView",
    "Snapshot",
    "Spill",
    "SpillMode",
    "Steps",
    "Store",
    "TierUse",
    "Tiering",
    "Totals",
    "in_one_go",
    "is_sound",
]
