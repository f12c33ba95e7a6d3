"""HTTP for people, probes and Prometheus: routes, views, metrics."""

from kvstore.admin.histogram import LAG_BOUNDS_S, MOTION_BOUNDS_S, FrozenHistogram, Histogram
from kvstore.admin.server import AdminServer
from kvstore.admin.view import Identity, Motion, ObjectsPage, View

__all__ = [
    "LAG_BOUNDS_S",
    "MOTION_BOUNDS_S",
    "AdminServer",
    "FrozenHistogram",
    "Histogram",
    "Identity",
    "Motion",
    "ObjectsPage",
    "View",
]
