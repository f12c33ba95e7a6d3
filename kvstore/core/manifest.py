"""The manifest of a namespace: everything that makes two KV caches incompatible, as readable JSON.

The namespace is the digest of the manifest's canonical bytes. Two engines share KV exactly if their
manifests are equal; if they unexpectedly do not, `differences` names the fields.
"""

import hashlib
from typing import NewType

import msgspec

from kvstore.core.errors import BadRequest
from kvstore.core.geometry import Geometry, LaneGroup
from kvstore.core.kinds import ObjectKinds
from kvstore.core.limits import MANIFEST_BYTES_MAX, RUNS_PER_OBJECT_MAX

Namespace = NewType("Namespace", bytes)
"""32 bytes: the digest of a manifest."""

_TAG = b"kvstore.namespace.v1\0"


Lanes = tuple[tuple[int, int, int], ...]
"""(layers, heads per layer, bytes per tile), in layer order."""


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objects beside chunks and tails, see `kvstore.core.kinds`.

    Args:
        name: what they hold, for instance `window(1024)`.
        tokens: of the largest object.
        unit_tokens: as in `Manifest`.
        lanes: as in `Manifest`, of this kind's layers.
    """

    name: str
    tokens: int
    unit_tokens: int
    lanes: Lanes

    @property
    def geometry(self) -> Geometry:
        """The shape of this kind's objects."""
        return Geometry(self.unit_tokens, tuple(LaneGroup(*lane) for lane in self.lanes))


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
        kinds: of objects beside chunks and tails; none for most models, and then not in the JSON.
        version: of this structure.
    """

    weights: str
    model: dict[str, str | int | float | bool | None]
    kv_dtype: str
    tile_format: str
    chunk_tokens: int
    unit_tokens: int
    lanes: Lanes
    kinds: tuple[Kind, ...] = ()
    version: int = 1

    def encode(self) -> bytes:
        """Canonical bytes: JSON with sorted keys."""
        fields = msgspec.structs.asdict(self)
        if not self.kinds:
            del fields["kinds"]
        return msgspec.json.encode(fields, order="sorted")

    @property
    def namespace(self) -> Namespace:
        """The digest of the canonical bytes."""
        return namespace_of(self.encode())

    @property
    def geometry(self) -> Geometry:
        """The shape of this namespace's chunks and tails."""
        return Geometry(self.unit_tokens, tuple(LaneGroup(*lane) for lane in self.lanes))

    @property
    def object_kinds(self) -> ObjectKinds:
        """The shapes of all its objects."""
        return ObjectKinds(
            (self.geometry, *(kind.geometry for kind in self.kinds)),
            (self.chunk_tokens, *(kind.tokens for kind in self.kinds)),
        )


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
    _check_shape("the manifest", manifest.lanes, manifest.chunk_tokens, "chunk_tokens", manifest.unit_tokens)
    for kind in manifest.kinds:
        _check_shape(f"the kind {kind.name}", kind.lanes, kind.tokens, "tokens", kind.unit_tokens)
    if manifest.object_kinds.ambiguous:
        raise BadRequest("the manifest has kinds of equally many runs that are not all of one size")
    return manifest


def _check_shape(whose: str, lanes: Lanes, tokens: int, name: str, unit_tokens: int) -> None:
    positive = lanes and all(min(lane) > 0 for lane in lanes)
    if not positive or unit_tokens <= 0 or tokens <= 0:
        raise BadRequest(f"{whose}'s lanes, unit_tokens and {name} must be positive")
    if tokens % unit_tokens:
        raise BadRequest(f"{name} {tokens} is not a multiple of unit_tokens {unit_tokens}")
    num_runs = sum(layers * heads for layers, heads, _ in lanes)
    if num_runs > RUNS_PER_OBJECT_MAX:
        raise BadRequest(f"{whose} has {num_runs} lanes; at most {RUNS_PER_OBJECT_MAX}")


def differences(one: Manifest, other: Manifest) -> list[str]:
    """The fields in which two manifests differ, each with both values: the answer to "why 0 hits?"."""
    return [
        f"{name}: {getattr(one, name)!r} != {getattr(other, name)!r}"
        for name in one.__struct_fields__
        if getattr(one, name) != getattr(other, name)
    ]
