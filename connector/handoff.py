"""The hand-off from prefill to decode: `kv_transfer_params` of a response, put into the next request.

Whatever a client may write into it, it can only make a request wait (bounded) and choose which of the known
nodes is asked first: keys are computed from the request's own tokens, and bytes are verified as always.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from connector.identity import DRAFT_METHOD
from connector.keys import Link
from connector.requests import HandOff
from kvstore.core import Manifest, MissReason, Namespace

NAME = "kvstore"
NODES_MAX = 16
FORMAT_MAX = 100  # characters of a foreign format that are shown


class Ignored(NamedTuple):
    """Why a hand-off cannot be used: a line, said once of each kind, and the reason of the misses to come."""

    kind: str
    line: str
    reason: MissReason | None = None


class _Note(msgspec.Struct, forbid_unknown_fields=True):
    """The first `tokens` of the prompt, which end with the key `last`, are at `nodes` or on their way there.

    `whole` is the key of the last whole chunk among them: an engine of another block size has no tail that ends with
    `last`. `format` is for people: it says what differs if the namespace does.
    """

    namespace: str
    tokens: int
    last: str
    nodes: list[str]
    whole: str = ""
    format: str = ""


def describe_format(manifest: Manifest) -> str:
    """What most often differs between engines, in a few words."""
    unit = "any block size" if manifest.unit_tokens == 1 else f"blocks of {manifest.unit_tokens} tokens"
    drafts = manifest.model.get(DRAFT_METHOD)
    more = f", with drafts by {drafts}" if drafts else ""
    return f"{manifest.tile_format} {manifest.kv_dtype}, {unit}, chunks of {manifest.chunk_tokens}{more}"


def write_note(manifest: Manifest, links: Sequence[Link], nodes: Sequence[str]) -> dict[str, Any] | None:
    """The parameters for a decode engine; `links` are the first of the prompt that are stored or under way."""
    if not links:
        return None
    whole = next((link.key.hex() for link in reversed(links) if not link.tail), "")
    note = _Note(
        manifest.namespace.hex(),
        links[-1].stop,
        links[-1].key.hex(),
        list(nodes[:NODES_MAX]),
        whole,
        describe_format(manifest),
    )
    return {NAME: msgspec.to_builtins(note)}


def read_note(
    params: Any, namespace: Namespace, links: Sequence[Link], own_format: str = ""
) -> HandOff | Ignored | None:
    """The hand-off that a request carries, if it can be used; None without one."""
    if not isinstance(params, dict) or NAME not in params:
        return None
    try:
        note = msgspec.convert(params[NAME], _Note)
    except msgspec.ValidationError as error:
        return Ignored("unreadable", f"it cannot be read: {error}")
    if note.namespace != namespace.hex():
        if note.format != own_format:
            what = f"its KV is {note.format[:FORMAT_MAX]!r}, here it is {own_format!r}"
        else:
            what = "weights or model configuration differ"
        line = (
            f"it comes from another namespace: {note.namespace[:16]!r}, not {namespace.hex()[:16]!r} as here"
        )
        return Ignored("namespace", f"{line}; {what}", MissReason.MANIFEST_DIFFERS)
    nodes = tuple(note.nodes[:NODES_MAX])
    for link in reversed(links):
        if (link.stop == note.tokens and link.key.hex() == note.last) or link.key.hex() == note.whole:
            return HandOff(link.stop, nodes)
    return Ignored("prompt", "it is of another prompt: no link of this request has one of its keys")
