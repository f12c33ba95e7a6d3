"""Whose frame is next: peers take turns, those with something small to say first.

A node that is busy all the time always has a batch of every client waiting. A Hello that waits for seven batches
takes milliseconds; a batch that waits for seven Hellos notices nothing. So a peer whose next frame is small comes
before peers whose next frame is large, but after some small ones it is the turn of a large one. A peer that floods
the node waits behind itself, and its own frames stay in order: a Release may not overtake the Acquire that it undoes.

A large batch is handled in slices. What is left of it is the next of its peer, and the first of the large ones: only
what is small comes in between.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, Union

from kvstore.core import limits

SMALL_BYTES = 2_048  # some tens of keys
SMALL_IN_A_ROW = 16
FRAMES_HELD = 64  # of all peers; what comes then stays in its connection
BYTES_HELD = limits.FRAME_BYTES_MAX

P = TypeVar("P", bound=Hashable)  # a peer

Rest = Callable[[], Union["Rest", None]]
"""Handles the next slice of a frame; what is then left of it."""


class Turns(Generic[P]):
    """Frames that were received and are not handled yet, or not to their end."""

    def __init__(self) -> None:
        self._small: OrderedDict[P, deque[bytes | Rest]] = OrderedDict()  # peers by their next frame
        self._large: OrderedDict[P, deque[bytes | Rest]] = OrderedDict()
        self._num_frames = 0
        self._num_bytes = 0
        self._in_a_row = 0  # small ones while a large one waited

    def __len__(self) -> int:
        return self._num_frames

    @property
    def full(self) -> bool:
        """Whether no more should be received for now."""
        return self._num_frames >= FRAMES_HELD or self._num_bytes >= BYTES_HELD

    def put(self, peer: P, frame: bytes) -> None:
        """A frame has come."""
        self._num_frames += 1
        self._num_bytes += len(frame)
        waiting = self._small.get(peer) or self._large.get(peer)
        if waiting is None:
            self._queue(peer, deque((frame,)))
        else:
            waiting.append(frame)

    def put_back(self, peer: P, rest: Rest) -> None:
        """This is left of what was taken last."""
        self._num_frames += 1
        waiting = self._small.pop(peer, None) or self._large.pop(peer, None) or deque()
        waiting.appendleft(rest)
        self._queue(peer, waiting)
        self._large.move_to_end(peer, last=False)

    def take(self) -> tuple[P, bytes | Rest]:
        """The peer whose turn it is, and its frame, or what is left of one. There must be one."""
        small_first = bool(self._small) and (not self._large or self._in_a_row < SMALL_IN_A_ROW)
        self._in_a_row = self._in_a_row + 1 if small_first and self._large else 0
        peer, waiting = (self._small if small_first else self._large).popitem(last=False)
        frame = waiting.popleft()
        self._num_frames -= 1
        self._num_bytes -= _size_bytes(frame)
        if waiting:
            self._queue(peer, waiting)
        return peer, frame

    def _queue(self, peer: P, waiting: deque[bytes | Rest]) -> None:
        """Behind the others whose next frame is of its size."""
        is_small = isinstance(waiting[0], bytes) and len(waiting[0]) <= SMALL_BYTES
        (self._small if is_small else self._large)[peer] = waiting


def _size_bytes(frame: bytes | Rest) -> int:
    return len(frame) if isinstance(frame, bytes) else 0
