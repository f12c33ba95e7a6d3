"""The mover: objects between this process's memory and a node's arena; blocking, bounded by a deadline.

    push   take a slot | fill it | write, hash it meanwhile ----------> end: slot back
    pull   take a slot | read ----------------> hash it, compare, sink | slot back

Objects overlap: while one is moving, the next one is filled and hashed, or the previous one is verified and
scattered. The bytes that are hashed are the mover's own: after a pull nobody else can change them between
the comparison and the sink. What was not verified never reaches a sink.

At the deadline nothing is waited for any more. A transfer that has not ended may still move bytes: its slot
is retired, or, where the caller gave an address, `settled` says when that memory is quiet again.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvstore.client.address import NodeAddress
from kvstore.client.flight import Job
from kvstore.client.staging import Staging
from kvstore.client.voyage import Voyage
from kvstore.core import Extents, MissReason, Part, Run, checksums, proves
from kvstore.transfer import Handle, Piece, Status, Transfer

MEET_S = 5.0


class PushItem(NamedTuple):
    """One object, or a rank's part of it, to be written.

    `source` fills a view of the part's size with the part's bytes, or is the address of registered memory
    that already holds them.
    """

    extents: Extents
    size_bytes: int
    part: Part
    source: Callable[[memoryview], None] | int


class PushResult(NamedTuple):
    """`checksums` has 8 bytes per run of the part, in its order. `quiet`: nothing of it can land late.

    `error` is a line for the log.
    """

    ok: bool
    quiet: bool = True
    checksums: bytes | None = None
    reason: MissReason | None = None
    error: str = ""


class PullItem(NamedTuple):
    """One object, or a rank's part of it, to be read and verified.

    `table` is the whole object's, or its seal if the part is all of it. `sink` gets the part's verified bytes, valid
    during the call only, or is the address of registered memory where they are wanted; there they are only good if
    the result is ok.
    """

    extents: Extents
    size_bytes: int
    part: Part
    table: bytes
    sink: Callable[[memoryview], None] | int


class PullResult(NamedTuple):
    """`corrupt`: the bytes came, and were not those of the table. `quiet`: no byte can land late in memory
    that the caller gave. `error` is a line for the log."""

    ok: bool
    reason: MissReason | None = None
    corrupt: bool = False
    quiet: bool = True
    error: str = ""


class _Push(Job[PushResult]):
    """An object on its way to the node."""

    def __init__(self, item: PushItem) -> None:
        self.extents, self.size_bytes, self.part, self._source = item
        self.address = self._source if isinstance(self._source, int) else None
        self._checksums = b""

    def before(self, view: memoryview) -> None:
        if not isinstance(self._source, int):
            self._source(view)

    def look(self, view: memoryview, runs: Sequence[Run]) -> None:
        self._checksums += checksums(view, runs)

    def after(self, view: memoryview) -> PushResult:
        return PushResult(ok=True, checksums=self._checksums)

    def missed(self, reason: MissReason | None, error: str, moving: bool, failed: bool) -> PushResult:
        return PushResult(ok=False, quiet=not (moving or failed), reason=reason, error=error)


class _Pull(Job[PullResult]):
    """An object on its way here."""

    def __init__(self, item: PullItem) -> None:
        self.extents, self.size_bytes, self.part, self._table, self._sink = item
        self.address = self._sink if isinstance(self._sink, int) else None
        self._checksums = b""
        assert sum(run.size_bytes for run in self.part.runs) == self.part.size_bytes, (
            "a part with bytes outside its runs cannot be verified"
        )

    def before(self, view: memoryview) -> None:
        pass

    def look(self, view: memoryview, runs: Sequence[Run]) -> None:
        self._checksums += checksums(view, runs)

    def after(self, view: memoryview) -> PullResult:
        if not proves(self._table, self._checksums, self.part.runs):
            error = "the bytes that came are not those of the table"
            return PullResult(ok=False, reason=MissReason.BAD_COPY, corrupt=True, error=error)
        if not isinstance(self._sink, int):
            self._sink(view)
        return PullResult(ok=True)

    def missed(self, reason: MissReason | None, error: str, moving: bool, failed: bool) -> PullResult:
        return PullResult(ok=False, reason=reason, quiet=not moving or self.address is None, error=error)


class Mover:
    """Pushes and pulls objects. All methods may be called from any thread.

    Args:
        transfer: how bytes move.
        staging: memory registered with `transfer`; a part larger than all of it cannot be staged.
    """

    def __init__(self, transfer: Transfer, staging: Staging) -> None:
        self._transfer = transfer
        self.staging = staging
        self._helper = ThreadPoolExecutor(1, "kvstore-copy")  # beside callers, by shared memory
        self._lock = threading.Lock()
        self._late: set[Handle] = set()  # transfers not ended at their deadline, in memory that callers gave

    def push(self, node: NodeAddress, items: Sequence[PushItem], deadline_s: float) -> list[PushResult]:
        """Writes objects into their granted pages, in order.

        Args:
            node: who holds the pages.
            items: what to write.
            deadline_s: seconds from now after which nothing is waited for any more.

        Returns:
            A result per item. Only what is `ok` may be committed; what is not `quiet` may still land.
        """
        voyage = self._voyage(node, deadline_s, reading=False)
        return [result for _, result in voyage.run([_Push(item) for item in items])]

    def pull(self, node: NodeAddress, items: Sequence[PullItem], deadline_s: float) -> list[PullResult]:
        """Reads objects, verifies them and hands them to their sinks, in order. Arguments as for `push`."""
        return [result for _, result in self.pull_each(node, items, deadline_s)]

    def pull_each(
        self, node: NodeAddress, items: Sequence[PullItem], deadline_s: float
    ) -> Generator[tuple[int, PullResult], None, None]:
        """As `pull`, but gives (position, result) as soon as an object has ended, while later ones are read."""
        voyage = self._voyage(node, deadline_s, reading=True)
        yield from voyage.run([_Pull(item) for item in items])

    def _voyage(self, node: NodeAddress, deadline_s: float, *, reading: bool) -> Voyage:
        return Voyage(
            self._transfer,
            self.staging,
            node,
            deadline_s,
            reading=reading,
            add_late=self._add_late,
            helper=self._helper,
        )

    def meet(self, node: NodeAddress) -> None:
        """Has the first contact with a node now, so that no object waits for it.

        Raises:
            TransferFailed: the node cannot be reached.
        """
        segment = self._transfer.reach(node.segments)
        slot = self.staging.take(1, MEET_S) if segment else None
        if slot is None:
            return
        for handle in (
            self._transfer.submit_write(segment, []),
            self._transfer.submit_read(segment, [Piece(slot.address, node.arena_base, 1)]),
        ):
            if self._transfer.wait(handle, MEET_S) is Status.PENDING:
                self.staging.retire(slot, [handle])
                return
        self.staging.give_back(slot)

    def settled(self, timeout_s: float) -> bool:
        """Whether, within `timeout_s`, all memory that callers gave to earlier calls is quiet."""
        end = time.monotonic() + timeout_s
        with self._lock:
            late, self._late = self._late, set()
        moving = {
            h for h in late if self._transfer.wait(h, max(0.0, end - time.monotonic())) is Status.PENDING
        }
        with self._lock:
            self._late |= moving
        return not moving

    def _add_late(self, handle: Handle) -> None:
        with self._lock:
            self._late.add(handle)
