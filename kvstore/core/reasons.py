"""Why a key was a miss: one closed list, shared by node, connector, metrics and docs."""

from enum import StrEnum


class MissReason(StrEnum):
    """Every way not to get a key's bytes. The value is the name in metrics and messages."""

    NEVER_STORED = "never_stored"
    FILLING = "filling"
    PENDING_TIMEOUT = "pending_timeout"
    EVICTED = "evicted"
    EXPIRED = "expired"
    BAD_COPY = "bad_copy"
    NODE_DOWN = "node_down"
    DEVICE_DOWN = "device_down"
    PROMOTE_DEADLINE = "promote_deadline"
    NO_ROOM = "no_room"
    LEASE_LIMIT = "lease_limit"
    TOO_SLOW = "too_slow"
    TOO_SHORT = "too_short"
    LOAD_FAILED_BEFORE = "load_failed_before"
    INDEX_DOWN = "index_down"
    MANIFEST_DIFFERS = "manifest_differs"
    LAYOUT_UNSUPPORTED = "layout_unsupported"
    BREAKER_OPEN = "breaker_open"
    NOT_AUTHORISED = "not_authorised"
