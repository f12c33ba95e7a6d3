"""The shared nouns, pure: keys, geometry, the life of a copy, miss reasons, limits, errors."""

from kvstore.core import limits
from kvstore.core.checksum import checksums, proves, seal, select, table_bytes_of
from kvstore.core.errors import (
    BadConfiguration,
    BadRequest,
    Corrupt,
    IndexDown,
    IndexRefused,
    KVStoreError,
    NamespaceUnknown,
    NotAuthorised,
    Overloaded,
    PeerLost,
    TransferFailed,
)
from kvstore.core.geometry import Extent, Extents, Geometry, LaneGroup, Part, Run, Span, locate, pages_for
from kvstore.core.keys import Extra, Key, chunk_key, encode_extras
from kvstore.core.kinds import ObjectKinds
from kvstore.core.life import LIFE, Event, State, Tier, step
from kvstore.core.manifest import Kind, Manifest, Namespace, decode_manifest, differences, namespace_of
from kvstore.core.queue import Link, Queue, unlink
from kvstore.core.reasons import MissReason

__all__ = [
    "LIFE",
    "BadConfiguration",
    "BadRequest",
    "Corrupt",
    "Event",
    "Extent",
    "Extents",
    "Extra",
    "Geometry",
    "IndexDown",
    "IndexRefused",
    "KVStoreError",
    "Key",
    "Kind",
    "LaneGroup",
    "Link",
    "Manifest",
    "MissReason",
    "Namespace",
    "NamespaceUnknown",
    "NotAuthorised",
    "ObjectKinds",
    "Overloaded",
    "Part",
    "PeerLost",
    "Queue",
    "Run",
    "Span",
    "State",
    "Tier",
    "TransferFailed",
    "checksums",
    "chunk_key",
    "decode_manifest",
    "differences",
    "encode_extras",
    "limits",
    "locate",
    "namespace_of",
    "pages_for",
    "proves",
    "seal",
    "select",
    "step",
    "table_bytes_of",
    "unlink",
]
