"""The manifest of a namespace: everything that makes two KV caches incompatible, as readable JSON.

The namespace is the digest of the manifest's canonical bytes. Two engines share KV exactly if their
manifests are equal; if they unexpectedly do not, `differences` names the fields.
"""

import hashlib
from typing import NewType

import msgspec

from kvstore.core.errors import BadRequest
from kvstore.core.geometry import Geometry, LaneGroup
from kvstore.core.limits import MANIFEST_BYTES_MAX, RUNS_PER_OBJECT_MAX

Namespace = NewType("Namespace", bytes)
"""32 bytes: the digest of a manifest."""

_TAG = b"kvstore.namespace.v1\0"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What identifies a namespace. Every field takes part in its digest; there are no comments in it.

    Args:
        weights: fingerprint of the weights' files, or the user's `weights_version`.
        model: the parts of the model configuration that change KV (architecture, rope, sizes, ...).
        kv_dtype: dtype of the cache, as vLLM names it.
        tile_format: what is inside a tile, for instance `cpu-vec`; never converted silently.
        chunk_tokens: tokens of a chunk.
        unit_tokens: tokens of a tile (the engine's block size where a tile cannot be cut, else 1).
        lanes: (layers, heads per layer, bytes per tile), in layer order.
        version: of this structure.
    """

    weights: str
    model: dict[str, str | int | float | bool | None]
    kv_dtype: str
    tile_format: str
    chunk_tokens: int
    unit_tokens: int
    lanes: tuple[tuple[int, int, int], ...]
    version: int = 1

    def encode(self) -> bytes:
        """Canonical bytes: JSON with sorted keys."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def namespace(self) -> Namespace:
        """The digest of the canonical bytes."""
        return namespace_of(self.encode())

    @property
    def geometry(self) -> Geometry:
        """The shape of this namespace's objects."""
        return Geometry(self.unit_tokens, tuple(LaneGroup(*lane) for lane in self.lanes))


def namespace_of(manifest: bytes) -> Namespace:
    """The namespace that these manifest bytes name."""
    return Namespace(hashlib.sha256(_TAG + manifest).digest())


def decode_manifest(data: bytes) -> Manifest:
    """Parses and checks a manifest that came from outside.

    Raises:
        BadRequest: it is not a manifest, or its geometry is impossible.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise BadRequest(f"the manifest has {len(data)} bytes; at most {MANIFEST_BYTES_MAX} are allowed")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the manifest cannot be read: {error}") from error
    positive = manifest.lanes and all(min(lane) > 0 for lane in manifest.lanes)
    if not positive or manifest.unit_tokens <= 0 or manifest.chunk_tokens <= 0:
        raise BadRequest("the manifest's lanes, unit_tokens and chunk_tokens must be positive")
    if manifest.chunk_tokens % manifest.unit_tokens:
        raise BadRequest(
            f"chunk_tokens {manifest.chunk_tokens} is not a multiple of unit_tokens {manifest.unit_tokens}"
        )
    if manifest.geometry.num_runs > RUNS_PER_OBJECT_MAX:
        raise BadRequest(
            f"the manifest has {manifest.geometry.num_runs} lanes; at most {RUNS_PER_OBJECT_MAX}"
        )
    return manifest


def differences(one: Manifest, other: Manifest) -> list[str]:
    """The fields in which two manifests differ, each with both values: the answer to "why 0 hits?"."""
    return [
        f"{name}: {getattr(one, name)!r} != {getattr(other, name)!r}"
        for name in one.__struct_fields__
        if getattr(one, name) != getattr(other, name)
    ]
