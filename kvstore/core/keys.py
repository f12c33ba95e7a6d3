"""Keys: what names a chunk.

A key is the digest of a chunk's tokens *and of all before it*, so equal keys mean equal prefixes and a
lookup is a walk along one chain:

    key = SHA-256(tag | parent key | token count as u32-LE | tokens as u32-LE | canonical extras)

The first parent of a chain is the namespace digest, so nothing is shared between namespaces. A tail
(shorter than a chunk) is named the same way; the token count keeps it apart from every chunk.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

from kvstore.core.limits import KEY_BYTES

Key = NewType("Key", bytes)
"""32 bytes."""

Extra = tuple[str, str | int] | tuple[str, str, int]
"""What besides tokens decides a chunk's KV: ("lora", digest), ("salt", text), ("mm", identifier, offset), ..."""

_TAG = b"kvstore.key.v1\0"
assert array("I").itemsize == 4, "tokens are hashed as u32"


def encode_extras(extras: Iterable[Extra]) -> bytes:
    """Canonical bytes of a chunk's extras: sorted, ASCII JSON; empty extras are zero bytes."""
    ordered = sorted(extras, key=lambda extra: [str(word) for word in extra])
    return json.dumps(ordered, separators=(",", ":"), ensure_ascii=True).encode() if ordered else b""


def chunk_key(parent: Key, tokens: Sequence[int], extras: Iterable[Extra] = ()) -> Key:
    """The key of `tokens` following the prefix that `parent` names.

    Args:
        parent: key of the previous chunk, or the namespace digest for the first one.
        tokens: token ids of this chunk or tail, each in [0, 2**32).
        extras: the canonical extras of this chunk, in any order.
    """
    assert len(parent) == KEY_BYTES, f"a parent key has {KEY_BYTES} bytes, not {len(parent)}"
    digest = hashlib.sha256(_TAG)
    digest.update(parent)
    digest.update(len(tokens).to_bytes(4, "little"))
    packed = array("I", tokens)
    digest.update(packed if _LITTLE else _swapped(packed))
    digest.update(encode_extras(extras))
    return Key(digest.digest())


_LITTLE = array("I", [1]).tobytes()[0] == 1


def _swapped(packed: "array[int]") -> "array[int]":
    packed.byteswap()
    return packed
