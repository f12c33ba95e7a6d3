"""The life of a copy, as a table: {state: {event: next state}}.

Only the store room changes state, and only through `step`; an illegal step is our bug and says so.
docs/PROTOCOL.md shows this table.
"""

from enum import StrEnum


class Tier(StrEnum):
    """Where a copy lies."""

    DRAM = "dram"
    NVME = "nvme"


class State(StrEnum):
    """What a copy is good for."""

    FILLING = "filling"  # reserved: a writer, or the node itself, is putting bytes into its pages
    READY = "ready"  # committed: may be promised and read
    MOVING = "moving"  # ready, and the node is copying it to another tier: may be read, not freed
    BAD = "bad"  # its bytes did not verify: no new promises; its pages go when the last lease ends
    GONE = "gone"  # pages are given back, free or held


class Event(StrEnum):
    """What happens to a copy."""

    COMMIT = "commit"
    ABORT = "abort"
    EXPIRE = "expire"
    EVICT = "evict"
    MOVE = "move"
    MOVED = "moved"
    SPOIL = "spoil"
    DROP = "drop"


LIFE: dict[State, dict[Event, State]] = {
    State.FILLING: {
        Event.COMMIT: State.READY,
        Event.ABORT: State.GONE,
        Event.EXPIRE: State.GONE,
    },
    State.READY: {
        Event.EVICT: State.GONE,
        Event.MOVE: State.MOVING,
        Event.SPOIL: State.BAD,
        Event.DROP: State.GONE,
    },
    State.MOVING: {
        Event.MOVED: State.READY,
        Event.SPOIL: State.BAD,
    },
    State.BAD: {
        Event.DROP: State.GONE,
    },
    State.GONE: {},
}


def step(state: State, event: Event) -> State:
    """The state after `event`.

    Raises:
        AssertionError: the table has no such step.
    """
    following = LIFE[state].get(event)
    assert following is not None, f"a copy that is {state} cannot {event}"
    return following
