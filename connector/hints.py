"""What a request may say of its KV, in `kv_transfer_params` beside a hand-off.

A hint changes what is evicted first and how a tail is cut, never what is right: whatever a client writes into it, it
cannot harm others. All but `live` come down to the one flag that the store knows, *cold*: first to be evicted, unless
others use it as well.
"""

import math
from typing import Any, NamedTuple

SHORT_TTL_S = 600.0
"""What shall be of use for no longer than this is cold. There are no timers: room decides when it goes."""


class Hints(NamedTuple):
    """One request's hints.

    Args:
        save_cold: what is saved for it is cold: `one_shot`, or a short `ttl_s`.
        release_cold: what it has pulled will not be needed again: `consume_once`.
        live: its answer may have to be continued by another engine, and this many tokens at the end of its prompt
            are the beginning of that answer. None: it is an ordinary request.
    """

    save_cold: bool = False
    release_cold: bool = False
    live: int | None = None


def read_hints(params: Any) -> tuple[Hints, list[str]]:
    """The hints in `kv_transfer_params`, and a line for each that means nothing and is ignored."""
    if not isinstance(params, dict):
        return Hints(), []
    bad: list[str] = []

    def flag(name: str) -> bool:
        value = params.get(name)
        if value is not None and not isinstance(value, bool):
            bad.append(f"{name} is {_shown(value)}, neither true nor false")
        return value is True

    ttl_s, live = params.get("ttl_s"), params.get("live")
    if ttl_s is not None and not _is_duration(ttl_s):
        bad.append(f"ttl_s is {_shown(ttl_s)}, not a number of seconds")
        ttl_s = None
    if live is not None and (not isinstance(live, int) or isinstance(live, bool) or live < 0):
        bad.append(f"live is {_shown(live)}, not a number of tokens")
        live = None
    cold = flag("one_shot") or (ttl_s is not None and ttl_s <= SHORT_TTL_S)
    return Hints(cold, flag("consume_once"), live), bad


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _shown(value: object) -> str:
    return repr(value)[:40]
