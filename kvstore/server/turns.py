"""Whose frame is next: peers take turns, those with something small to say first.

A node that is busy all the time always has a batch of every client waiting. A Hello that waits for seven batches
takes milliseconds; a batch that waits for seven Hellos notices nothing. So a peer whose next frame is small comes
before peers whose next frame is large, but after some small ones it is the turn of a large one. A peer that floods
the node waits behind itself, and its own frames stay in order: a Release may not overtake the Acquire that it undoes.
"""

from collections import OrderedDict, deque

from kvstore.core import limits

SMALL_BYTES = 2_048  # some tens of keys
SMALL_IN_A_ROW = 16
FRAMES_HELD = 64  # of all peers; what comes then stays in ZMQ's queue of its peer
BYTES_HELD = limits.FRAME_BYTES_MAX


class Turns:
    """Frames that were received and are not handled yet."""

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, deque[bytes]] = OrderedDict()  # peers by their next frame
        self._large: OrderedDict[bytes, deque[bytes]] = OrderedDict()
        self._num_frames = 0
        self._num_bytes = 0
        self._in_a_row = 0  # small ones while a large one waited

    def __len__(self) -> int:
        return self._num_frames

    @property
    def full(self) -> bool:
        """Whether no more should be received for now."""
        return self._num_frames >= FRAMES_HELD or self._num_bytes >= BYTES_HELD

    def put(self, peer: bytes, frame: bytes) -> None:
        """A frame has come."""
        self._num_frames += 1
        self._num_bytes += len(frame)
        waiting = self._small.get(peer) or self._large.get(peer)
        if waiting is None:
            self._queue(peer, deque((frame,)))
        else:
            waiting.append(frame)

    def take(self) -> tuple[bytes, bytes]:
        """The peer whose turn it is, and its frame. There must be one."""
        small_first = bool(self._small) and (not self._large or self._in_a_row < SMALL_IN_A_ROW)
        self._in_a_row = self._in_a_row + 1 if small_first and self._large else 0
        peer, waiting = (self._small if small_first else self._large).popitem(last=False)
        frame = waiting.popleft()
        self._num_frames -= 1
        self._num_bytes -= len(frame)
        if waiting:
            self._queue(peer, waiting)
        return peer, frame

    def _queue(self, peer: bytes, waiting: deque[bytes]) -> None:
        """Behind the others whose next frame is of its size."""
        (self._small if len(waiting[0]) <= SMALL_BYTES else self._large)[peer] = waiting
