"""A voyage: one call of the mover, a window of objects under way to or from one node.

    begin    take a slot (or the caller's memory), `Job.before`, submit the parcels, `Job.look` at what was gathered
    finish   parcel by parcel: wait, submit more, `Job.look` at what came; `Job.after`, slot back

What is sent from the caller's memory is looked at when all that fits the window has been submitted.

Where the node's memory is here (`Transfer.by_hand`) nothing is submitted: a thread copies and looks by turns, so that
the bytes it looks at are in its caches. The caller's thread and a helper take the objects in order.

The window holds so many bytes, or a single object of any size, of which so many are under way. The oldest flight is
always finished first, so results come in order, and a flight's slot is given up on every way out.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from kvstore.client.address import NodeAddress
from kvstore.client.flight import READ_PARCEL_BYTES, Flight, Job, parcels, portions
from kvstore.client.staging import Staging
from kvstore.client.turns import by_turns
from kvstore.core import MissReason, TransferFailed, limits, locate
from kvstore.transfer import HandCopy, Handle, Piece, Status, Transfer

R = TypeVar("R")


class Voyage:
    """Moves jobs' bytes between memory here and the node's arena, until the deadline.

    Args:
        transfer: how.
        staging: slots for jobs without memory of their own.
        node: with whom.
        deadline_s: seconds from now.
        reading: from the node, else to it.
        add_late: is given the transfers that have not ended at the deadline, in memory that callers gave.
        helper: a thread that copies beside the caller's.
    """

    def __init__(
        self,
        transfer: Transfer,
        staging: Staging,
        node: NodeAddress,
        deadline_s: float,
        *,
        reading: bool,
        add_late: Callable[[Handle], None],
        helper: Executor,
    ) -> None:
        self._transfer = transfer
        self._staging = staging
        self._node = node
        self._segment = ""
        self._end = time.monotonic() + deadline_s
        self._reading = reading
        self._submit = transfer.submit_read if reading else transfer.submit_write
        self._add_late = add_late
        self._helper = helper
        window_bytes = limits.TRANSFER_BATCH_BYTES_MAX
        self._parcel_bytes = min(READ_PARCEL_BYTES, window_bytes) if reading else window_bytes
        self._parcels_max = window_bytes // self._parcel_bytes  # of one flight, under way
        self._under_way_bytes = 0
        self._down = ""
        self._is_near = False
        try:
            self._segment = transfer.reach(node.segments)
            if not self._segment:
                self._down = f"the node cannot be reached by {transfer.protocol}"
            elif nothing := transfer.by_hand(self._segment, (), writing=not reading):
                nothing.close()
                self._is_near = True
        except TransferFailed as error:
            self._down = str(error)

    def run(self, jobs: Sequence[Job[R]]) -> Iterator[tuple[int, R]]:
        """Gives (position, result) of every job, in order, each as soon as it has ended."""
        if self._is_near:
            yield from by_turns(partial(self._carry_one, jobs), len(jobs), self._helper)
            return
        waiting = deque(enumerate(jobs))
        flights: deque[Flight[R]] = deque()
        begun: list[Flight[R]] = []
        try:
            while waiting or flights:
                while waiting and self._fits(waiting[0][1]):
                    flight = self._begin(*waiting[0], wait=not flights)
                    if flight is None:
                        break
                    flights.append(flight)
                    begun.append(flight)
                    waiting.popleft()
                    self._under_way_bytes += flight.job.part.size_bytes
                self._look_at_what_is_sent(begun)
                flight = flights.popleft()
                self._under_way_bytes -= flight.job.part.size_bytes
                yield flight.index, self._finish(flight)
        finally:
            for flight in flights:
                self._let_go(flight)

    def _look_at_what_is_sent(self, begun: list[Flight[R]]) -> None:
        """While all of it is under way: to hash one before the next is submitted would keep the network waiting."""
        for flight in begun:
            if not self._reading and flight.result is None:
                flight.look(flight.job.part.size_bytes)
        begun.clear()

    def _carry_one(self, jobs: Sequence[Job[R]], index: int) -> R:
        flight = self._begin(index, jobs[index], wait=True)
        assert flight is not None, "who waits for memory goes on with it, or with a result"
        return self._finish(flight)

    def _left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _fits(self, job: Job[R]) -> bool:
        together = self._under_way_bytes + job.part.size_bytes
        return not self._under_way_bytes or together <= limits.TRANSFER_BATCH_BYTES_MAX

    def _begin(self, index: int, job: Job[R], wait: bool) -> Flight[R] | None:
        """The job under way, or with its result if it cannot be; None if it must wait for a slot."""
        flight = Flight(index, job)
        try:
            flight.result = self._obstacle(job)
            if flight.result is None:
                if not self._give_memory(flight, wait):
                    return None
                if flight.result is None:
                    job.before(flight.view)
                    self._depart(flight)
        except TransferFailed as error:
            self._down = str(error)
            moving = bool(flight.under_way)
            flight.result = job.missed(MissReason.NODE_DOWN, self._down, moving=moving, failed=False)
        except Exception as error:  # noqa: BLE001 - whatever a caller's source raises is this object's result
            moving = bool(flight.under_way)
            flight.result = job.missed(None, f"its source failed: {error!r}", moving=moving, failed=False)
        except BaseException:
            self._let_go(flight)
            raise
        return flight

    def _depart(self, flight: Flight[R]) -> None:
        """Carries the flight out by hand, or submits its first parcels."""
        pieces = self._pieces(flight)
        copy = self._transfer.by_hand(self._segment, pieces, writing=not self._reading)
        if copy is not None:
            try:
                flight.result = self._carry(flight, copy)
            finally:
                copy.close()
            return
        flight.to_come.extend(parcels(pieces, self._parcel_bytes))
        self._send(flight)
        if not self._reading and flight.slot:  # gathered just now, it is in the caches
            flight.look(flight.job.part.size_bytes)

    def _carry(self, flight: Flight[R], copy: HandCopy) -> R:
        """Copies and looks, portion by portion."""
        job, start = flight.job, 0
        for runs, end in portions(job.part):
            if self._left_s() <= 0:
                return self._too_late(flight)
            if not copy.move(end - start):
                return self._broken(flight)
            job.look(flight.view, runs)
            start = end
        return self._arrive(flight)

    def _obstacle(self, job: Job[R]) -> R | None:
        """The result of a job that need not be tried."""
        held_bytes = sum(extent[1] for extent in job.extents) * self._node.page_bytes
        if self._down:
            reason, error = MissReason.NODE_DOWN, self._down
        elif self._left_s() <= 0:
            reason, error = MissReason.TOO_SLOW, "the deadline came before it was begun"
        elif held_bytes < job.size_bytes:
            reason, error = (
                MissReason.BAD_COPY,
                f"{job.size_bytes} bytes cannot be in extents of {held_bytes}",
            )
        elif job.address is None and job.part.size_bytes > self._staging.size_bytes:
            reason = MissReason.NO_ROOM
            error = f"{job.part.size_bytes} bytes do not fit into the {self._staging.size_bytes} of staging; raise it"
        else:
            return None
        return job.missed(reason, error, moving=False, failed=False)

    def _give_memory(self, flight: Flight[R], wait: bool) -> bool:
        """Takes the caller's memory or a slot; False if a slot will be there when an older flight has ended."""
        job = flight.job
        if job.address is not None:
            flight.view = memoryview((ctypes.c_char * job.part.size_bytes).from_address(job.address)).cast(
                "B"
            )
            return True
        flight.slot = self._staging.take(job.part.size_bytes, self._left_s() if wait else 0.0)
        if flight.slot:
            flight.view = flight.slot.view
        elif wait:
            error = "all staging memory was in use until the deadline"
            flight.result = job.missed(MissReason.TOO_SLOW, error, moving=False, failed=False)
        return flight.slot is not None or wait

    def _pieces(self, flight: Flight[R]) -> list[Piece]:
        """Where the part's bytes are here and there."""
        job = flight.job
        local = flight.slot.address if flight.slot else job.address
        assert local is not None, "a flight without memory"
        pieces = []
        for offset, size in locate(job.extents, self._node.page_bytes, job.part.spans):
            pieces.append(Piece(local, self._node.arena_base + offset, size))
            local += size
        return pieces

    def _send(self, flight: Flight[R]) -> None:
        """Submits parcels, as far as the window and the time allow."""
        while flight.to_come and len(flight.under_way) < self._parcels_max and self._left_s() > 0:
            parcel = flight.to_come.popleft()
            flight.under_way.append((self._submit(self._segment, parcel.pieces), parcel))

    def _finish(self, flight: Flight[R]) -> R:
        """Sees the flight to its end, or to the deadline; its result."""
        try:
            return self._ended(flight) if flight.result is None else flight.result
        finally:
            self._let_go(flight)

    def _ended(self, flight: Flight[R]) -> R:
        job = flight.job
        if not self._reading:
            flight.look(job.part.size_bytes)
        try:
            status = self._see_through(flight)
        except TransferFailed as error:
            self._down = str(error)
            moving = bool(flight.under_way)
            return job.missed(MissReason.NODE_DOWN, self._down, moving=moving, failed=False)
        if status is Status.PENDING:
            return self._too_late(flight)
        if status is Status.FAILED:
            return self._broken(flight)
        return self._arrive(flight)

    def _too_late(self, flight: Flight[R]) -> R:
        moving = bool(flight.under_way)
        return flight.job.missed(MissReason.TOO_SLOW, "the deadline came first", moving=moving, failed=False)

    def _broken(self, flight: Flight[R]) -> R:
        self._down = f"a transfer with the segment {self._segment} failed"
        moving = bool(flight.under_way)
        return flight.job.missed(MissReason.NODE_DOWN, self._down, moving=moving, failed=True)

    def _arrive(self, flight: Flight[R]) -> R:
        """The result of bytes that have all moved and been looked at."""
        try:
            return flight.job.after(flight.view)
        except Exception as error:  # noqa: BLE001 - whatever a caller's sink raises is this object's result
            return flight.job.missed(None, f"its sink failed: {error!r}", moving=False, failed=False)

    def _see_through(self, flight: Flight[R]) -> Status:
        """Waits for all parcels. PENDING when time is up; then what is `under_way` still moves."""
        while True:
            self._send(flight)
            if not flight.under_way:
                return Status.PENDING if flight.to_come else Status.DONE
            handle, parcel = flight.under_way[0]
            status = self._transfer.wait(handle, self._left_s())
            if status is Status.PENDING:
                return status
            flight.under_way.popleft()
            if status is Status.FAILED:
                return status
            if self._reading:
                self._send(flight)
                flight.look(parcel.end)

    def _let_go(self, flight: Flight[R]) -> None:
        """Gives the flight's memory up: at once if it is quiet, else when its parcels have ended."""
        moving = [handle for handle, _ in flight.under_way if self._transfer.poll(handle) is Status.PENDING]
        if flight.slot and moving:
            self._staging.retire(flight.slot, moving)
        elif flight.slot:
            self._staging.give_back(flight.slot)
        else:
            for handle in moving:
                self._add_late(handle)
