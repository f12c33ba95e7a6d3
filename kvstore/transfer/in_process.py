"""Transfers inside one process: the plain twin of the real transports, and the place to try faults.

An `InProcessNetwork` knows the segments by name; an `InProcessTransfer` is one endpoint of it. Copies are
real (`memmove`) and happen inside `submit_*`, unless a `Fault` says otherwise. Nothing here has a clock or
a thread: what is held back moves when the test says so, so every run is the same.
"""

import ctypes
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.core import TransferFailed
from kvstore.transfer.base import Handle, Piece, Status
from kvstore.transfer.pieces import merge


class Fault(Enum):
    """What goes wrong with a transfer."""

    HOLD = "hold"  # nothing moves until `release`; then all of it
    FAIL = "fail"  # `at_byte` bytes move, then it has failed
    FLIP = "flip"  # all bytes move, the one at `at_byte` with a bit flipped, and it is done
    REFUSE = "refuse"  # the submission raises


@dataclass(slots=True)
class Plan:
    """A fault for the next transfers that `applies` to. `hits` counts those it met, so a test can prove it did.

    Args:
        fault: what happens.
        at_byte: counted over the transfer's pieces in order.
        times: how many transfers it meets.
        reads: whether reads are met.
        writes: whether writes are met.
    """

    fault: Fault
    at_byte: int = 0
    times: int = 1
    reads: bool = True
    writes: bool = True
    hits: int = 0

    def applies(self, reading: bool) -> bool:
        """Whether the next transfer is met."""
        return self.hits < self.times and (self.reads if reading else self.writes)


@dataclass(slots=True)
class _Moving:
    segment: str
    pieces: list[Piece]
    reading: bool
    status: Status = Status.PENDING


@dataclass(slots=True)
class InProcessNetwork:
    """The segments of one process, the faults to come, and what has moved.

    `copied_bytes` counts bytes that moved; `late_bytes` those of them that moved in `release`.
    """

    copied_bytes: int = 0
    late_bytes: int = 0
    reads: int = 0
    writes: int = 0
    plans: list[Plan] = field(default_factory=list)
    endpoints: dict[str, "InProcessTransfer"] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def plan(
        self, fault: Fault, at_byte: int = 0, times: int = 1, reads: bool = True, writes: bool = True
    ) -> Plan:
        """Arranges a fault; see `Plan`."""
        plan = Plan(fault, at_byte, times, reads, writes)
        with self.lock:
            self.plans.append(plan)
        return plan

    def meet(self, reading: bool) -> Plan | None:
        """The fault that the transfer being submitted meets, if any; counted. Called under the lock."""
        self.reads += reading
        self.writes += not reading
        plan = next((plan for plan in self.plans if plan.applies(reading)), None)
        if plan:
            plan.hits += 1
        return plan

    def release(self) -> int:
        """Lets everything held back move now, or fail if an end of it is gone; how many transfers that were."""
        with self.lock:
            before = self.copied_bytes
            moved = sum(endpoint.move_held() for endpoint in self.endpoints.values())
            self.late_bytes += self.copied_bytes - before
            return moved


class InProcessTransfer:
    """One endpoint: memory registered here can be moved, and be reached by other endpoints of the network."""

    protocol = "in_process"

    def __init__(self, network: InProcessNetwork, name: str = "") -> None:
        self._network = network
        self._handles = itertools.count(1)
        self._moving: dict[Handle, _Moving] = {}
        self._regions: dict[int, int] = {}
        with network.lock:
            self._segment = name or f"segment-{len(network.endpoints)}"
            assert self._segment not in network.endpoints, f"there is a segment {self._segment} already"
            network.endpoints[self._segment] = self

    def __repr__(self) -> str:
        return (
            f"<InProcessTransfer {self._segment}, {len(self._regions)} regions, {len(self._moving)} moving>"
        )

    @property
    def segment(self) -> str:
        """The endpoint's name in the network."""
        return self._segment

    def reach(self, segments: Mapping[str, str]) -> str:
        """See `Transfer.reach`."""
        return segments.get(self.protocol, "")

    def register(self, address: int, size_bytes: int) -> None:
        """See `Transfer.register`."""
        with self._network.lock:
            if any(
                start < address + size_bytes and address < start + n for start, n in self._regions.items()
            ):
                raise TransferFailed(f"memory at {address:#x} is registered already")
            self._regions[address] = size_bytes

    def unregister(self, address: int) -> None:
        """See `Transfer.unregister`."""
        with self._network.lock:
            del self._regions[address]

    def submit_read(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_read`."""
        return self._submit(_Moving(segment, merge(pieces), reading=True))

    def submit_write(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_write`."""
        return self._submit(_Moving(segment, merge(pieces), reading=False))

    def by_hand(self, segment: str, pieces: Sequence[Piece], *, writing: bool) -> None:
        """None: see `Transfer.by_hand`."""

    def poll(self, handle: Handle) -> Status:
        """See `Transfer.poll`."""
        with self._network.lock:
            status = self._moving[handle].status
            if status is not Status.PENDING:
                del self._moving[handle]
            return status

    def wait(self, handle: Handle, timeout_s: float) -> Status:
        """As `poll`: what is held back does not move by waiting."""
        return self.poll(handle)

    def close(self) -> None:
        """See `Transfer.close`."""
        with self._network.lock:
            self._regions.clear()
            self._network.endpoints.pop(self._segment, None)
            for moving in self._moving.values():
                moving.status = Status.FAILED if moving.status is Status.PENDING else moving.status

    def move_held(self) -> int:
        """Lets what is held back here move now; how many transfers that were. See `InProcessNetwork.release`."""
        held = [moving for moving in self._moving.values() if moving.status is Status.PENDING]
        for moving in held:
            moving.status = self._copy(moving, None)
        return len(held)

    def _submit(self, moving: _Moving) -> Handle:
        with self._network.lock:
            if moving.segment not in self._network.endpoints:
                raise TransferFailed(f"there is no segment {moving.segment}")
            for local, _, size_bytes in moving.pieces:
                if not self.holds(local, size_bytes):
                    raise TransferFailed(
                        f"{size_bytes} bytes at {local:#x} lie outside the memory registered here"
                    )
            plan = self._network.meet(moving.reading)
            if plan and plan.fault is Fault.REFUSE:
                raise TransferFailed("refused, as planned")
            if not plan or plan.fault is not Fault.HOLD:
                moving.status = self._copy(moving, plan)
            handle = Handle(next(self._handles))
            self._moving[handle] = moving
            return handle

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether this memory is registered here."""
        return any(
            start <= address and address + size_bytes <= start + n for start, n in self._regions.items()
        )

    def _copy(self, moving: _Moving, plan: Plan | None) -> Status:
        """Moves the pieces, up to the fault; each only if both its ends are registered now."""
        limit = plan.at_byte if plan and plan.fault is Fault.FAIL else None
        position = 0
        for local, remote, size_bytes in moving.pieces:
            peer = self._network.endpoints.get(moving.segment)
            if not (peer and peer.holds(remote, size_bytes) and self.holds(local, size_bytes)):
                return Status.FAILED
            size = size_bytes if limit is None else min(size_bytes, limit - position)
            target, source = (local, remote) if moving.reading else (remote, local)
            ctypes.memmove(target, source, size)
            self._network.copied_bytes += size
            if plan and plan.fault is Fault.FLIP and position <= plan.at_byte < position + size:
                ctypes.c_ubyte.from_address(target + plan.at_byte - position).value ^= 0x10
            position += size
            if limit is not None and position >= limit:
                return Status.FAILED
        return Status.DONE
