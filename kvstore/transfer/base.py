"""The contract of bytes in motion.

A transfer moves bytes between this process's memory and a segment (a node's arena) one-sided: the other
side's program does not take part. Clauses every implementation keeps (tests/contracts/transfer.py):

* `submit_*` returns at once; several transfers may be under way to several segments.
* DONE means: all bytes of all pieces are there, and nothing of this transfer will move any more.
* FAILED means: some may have moved, and on this side nothing of this transfer will move any more: local
  memory may be used again. Of a write, bytes that had already left may still land at the peer (over TCP,
  what a stopped peer's kernel has received is applied when it goes on): the caller has its target pages held.
* PENDING says nothing, and stays possible long after any deadline: until `poll` has said DONE or FAILED,
  late bytes may land in the target *and*, of a write, be read from the source. The caller keeps both
  out of use (held pages, retired staging) until then, or unregisters the memory.
* An address outside the peer's registered memory fails the transfer; nothing outside is touched. Of a piece that
  begins inside, what lies inside may be written over RDMA; over TCP nothing is.
* No call but `close` blocks other Python threads for longer than about 10 us (the GIL is released).
* All methods may be called from any thread. After `close` every transfer has ended.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, NewType, Protocol

Handle = NewType("Handle", int)
"""Names one submitted transfer until `poll` has returned DONE or FAILED for it once."""


class Piece(NamedTuple):
    """One contiguous copy: local address, address in the peer's segment, bytes."""

    local_address: int
    remote_address: int
    size_bytes: int


class Status(Enum):
    """Where a transfer is."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class HandCopy(Protocol):
    """A transfer that its caller's thread carries out, so that it can hash bytes while they are in its caches."""

    def move(self, size_bytes: int) -> bool:
        """Copies the next bytes of the pieces, in order. False: it has failed, and nothing of it moves any more."""

    def close(self) -> None:
        """Ends it, wherever it is. Not to be called while `move` is."""


class Transfer(Protocol):
    """Moves bytes between registered local memory and segments of peers."""

    protocol: str
    """Key of `Welcome.transfer` that this implementation talks to: "mooncake", "in_process", ..."""

    @property
    def segment(self) -> str:
        """The name under which peers reach the memory registered here."""

    def reach(self, segments: Mapping[str, str]) -> str:
        """The segment to use for a node that says this of itself (`Welcome.transfer`); empty: none reaches it.

        May wait for a second, when a node is met for the first time.
        """

    def register(self, address: int, size_bytes: int) -> None:
        """Makes local memory a source or target of transfers, and, on a node, reachable for peers.

        Raises:
            TransferFailed: the memory cannot be registered.
        """

    def unregister(self, address: int) -> None:
        """Ends that. Afterwards no transfer of this side moves there any more, not even late bytes.

        New transfers of peers are refused; one that a peer had under way may go on until `close`.
        May wait for transfers under way to end, or raise TransferFailed if one does not.
        """

    def submit_read(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """Starts copying from the segment to local memory.

        Raises:
            TransferFailed: nothing was started (unknown peer, refused address): nothing will move.
        """

    def submit_write(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """Starts copying from local memory to the segment. Raises as `submit_read`."""

    def by_hand(self, segment: str, pieces: Sequence[Piece], *, writing: bool) -> HandCopy | None:
        """The same copies for the caller to carry out, and to `close`. None: these can only be submitted. Raises as
        `submit_*`."""

    def poll(self, handle: Handle) -> Status:
        """Where the transfer is, without waiting. After DONE or FAILED the handle is forgotten."""

    def wait(self, handle: Handle, timeout_s: float) -> Status:
        """As `poll`, but waits for an end for up to `timeout_s`; PENDING when there was none."""

    def close(self) -> None:
        """Ends everything. Nothing moves any more when it returns."""
