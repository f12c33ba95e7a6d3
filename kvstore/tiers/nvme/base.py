"""What goes into a device and comes out of it, in plain values."""

import asyncio
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvstore.core import Key, Namespace
from kvstore.wire import Generation


class NewObject(NamedTuple):
    """An object to be put. `table` must be that of its bytes."""

    key: Key
    namespace: Namespace
    parent: Key
    depth: int
    generation: Generation
    size_bytes: int
    cold: bool
    table: bytes


class Refusal(StrEnum):
    """Why an object is not taken now."""

    DEVICE_DOWN = "device_down"
    NO_ROOM = "no_room"
    BUSY = "busy"  # too much is being written already
    WORN = "worn"  # the wear budget is used up


class Get(NamedTuple):
    """An object being read into memory.

    Args:
        table: the object's table once its bytes are in memory and match it; else Corrupt or DeviceDown.
        ended: done, in whatever way, when nothing touches the memory any more: perhaps later than `table`.
    """

    table: asyncio.Future[bytes]
    ended: asyncio.Future[bytes]


class Counts(msgspec.Struct):
    """Since the start; they only grow."""

    puts: int = 0
    put_bytes: int = 0
    gets: int = 0
    get_bytes: int = 0
    deletes: int = 0
    bad_copies: int = 0
    failed_puts: int = 0
    failed_gets: int = 0
