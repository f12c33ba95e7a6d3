"""The hand-off from prefill to decode: `kv_transfer_params` of a response, put into the next request.

Whatever a client may write into it, it can only make a request wait (bounded) and choose which of the known
nodes is asked first: keys are computed from the request's own tokens, and bytes are verified as always.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from connector.keys import Link
from connector.requests import HandOff
from kvstore.core import Namespace

NAME = "kvstore"
NODES_MAX = 16


class _Note(msgspec.Struct, forbid_unknown_fields=True):
    """The first `tokens` of the prompt, which end with the key `last`, are at `nodes` or on their way there."""

    namespace: str
    tokens: int
    last: str
    nodes: list[str]


def write_note(namespace: Namespace, links: Sequence[Link], nodes: Sequence[str]) -> dict[str, Any] | None:
    """The parameters for a decode engine; `links` are the first of the prompt that are stored or under way."""
    if not links:
        return None
    note = _Note(namespace.hex(), links[-1].stop, links[-1].key.hex(), list(nodes[:NODES_MAX]))
    return {NAME: msgspec.to_builtins(note)}


def read_note(params: Any, namespace: Namespace, links: Sequence[Link]) -> HandOff | str | None:
    """The hand-off that a request carries; None without one; why it cannot be used, as "kind: details"."""
    if not isinstance(params, dict) or NAME not in params:
        return None
    try:
        note = msgspec.convert(params[NAME], _Note)
    except msgspec.ValidationError as error:
        return f"it cannot be read: {error}"
    if note.namespace != namespace.hex():
        return (
            f"it comes from another namespace: {note.namespace[:16]!r}, not {namespace.hex()[:16]!r} as here "
            "(weights, model configuration, KV format or chunk_tokens differ)"
        )
    if not any(link.stop == note.tokens and link.key.hex() == note.last for link in links):
        return "it is of another prompt: no link of this request has its last key"
    return HandOff(note.tokens, tuple(note.nodes[:NODES_MAX]))
