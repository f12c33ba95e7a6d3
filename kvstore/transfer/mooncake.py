"""Transfers by Mooncake's Transfer Engine, peer to peer, over TCP or RDMA.

How its API becomes the contract of `base.py` (measured on 0.3.13; docs/decisions/0020):

* One batch id per piece. The status of a batch of several pieces is that of its first piece, and the call
  that looks at all of them busy-waits and frees a failed id while pieces are still moving. A handle of ours
  is a list of such ids; polling one costs less than a microsecond. Adjacent pieces are merged first, so an
  object in one extent is one piece.
* An id is freed by the poll that returns its end, so nobody polls it twice: a lock per process of polling.
* -2 (a time-out that Mooncake noticed) is not an end: the bytes may still land.
* The first contact with a peer may take a minute if that peer is stopped, so it happens in a thread. Mooncake holds a
  lock meanwhile: transfers to other peers wait in threads of theirs, and their callers' deadlines hold.
* Over TCP, unregistering memory does not stop a copy under way. `unregister` waits for it to end, which
  the progress time-out bounds. Over RDMA it does, at once.
"""

import importlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from kvstore.core import TransferFailed
from kvstore.transfer.base import Handle, Piece, Status
from kvstore.transfer.environment import check_devices, prepare_environment
from kvstore.transfer.pieces import merge

_POLL_S_MIN, _POLL_S_MAX = 50e-6, 1e-3
_UNREGISTER_MARGIN_S = 5.0
_CLOSE_S = 6.0  # Mooncake gives up connecting after 5


class _Engine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. All of these calls release the GIL."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], sizes: list[int]) -> int: ...
    def batch_unregister_memory(self, addresses: list[int]) -> int: ...
    def batch_transfer_async_read(
        self, peer: str, local: list[int], remote: list[int], sizes: list[int]
    ) -> int: ...
    def batch_transfer_async_write(
        self, peer: str, local: list[int], remote: list[int], sizes: list[int]
    ) -> int: ...
    def transfer_check_status(self, batch: int) -> int: ...


class _Moving:
    """A transfer that has not ended: batch ids of its pieces under way, and what is known already."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.batches: list[int] = []
        self.starting = True
        self.failed = False

    def touches(self, address: int, size_bytes: int) -> bool:
        return any(
            piece.local_address < address + size_bytes and address < piece.local_address + piece.size_bytes
            for piece in self.pieces
        )


class MooncakeTransfer:
    """One Transfer Engine of this process.

    Args:
        host: name or address under which peers reach this process.
        protocol: "tcp" or "rdma".
        devices: for rdma, comma-separated device names; empty for any active one.
        progress_timeout_s: a TCP transfer that moves nothing for so long has failed. Whole seconds, at least
            one, and one value per process (the last).

    Raises:
        TransferFailed: Mooncake is missing or does not start, or the RDMA device cannot be used.
    """

    protocol = "mooncake"

    def __init__(
        self, host: str, protocol: str = "tcp", devices: str = "", progress_timeout_s: float = 10.0
    ) -> None:
        if protocol not in {"tcp", "rdma"}:
            raise TransferFailed(f"Mooncake's protocol {protocol!r} is not known; take tcp or rdma")
        if protocol == "rdma":
            check_devices(devices)
        self._protocol = protocol
        self._progress_timeout_s = progress_timeout_s
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards all below
        self._handles = itertools.count(1)
        self._moving: dict[Handle, _Moving] = {}
        self._regions: dict[int, int] = {}
        self._met: set[str] = set()  # segments that answered once
        self._meeting: dict[
            str, deque[tuple[_Moving, bool]]
        ] = {}  # by segment: (what, reading) to be submitted
        prepare_environment(protocol, progress_timeout_s)
        self._engine: _Engine | None = _start(host, protocol, devices)
        self._segment = f"{f'[{host}]' if ':' in host else host}:{self._engine.get_rpc_port()}"

    def __repr__(self) -> str:
        return f"<MooncakeTransfer {self._segment}, {len(self._regions)} regions, {len(self._moving)} moving>"

    @property
    def segment(self) -> str:
        """`host:port` of Mooncake's handshake; peers use it as the segment's name."""
        return self._segment

    def reach(self, segments: Mapping[str, str]) -> str:
        """See `Transfer.reach`."""
        return segments.get(self.protocol, "")

    def register(self, address: int, size_bytes: int) -> None:
        """See `Transfer.register`."""
        code = self._running().batch_register_memory([address], [size_bytes])
        if code != 0:
            raise TransferFailed(
                f"Mooncake could not register {size_bytes} bytes at {address:#x} (code {code}): the memory is "
                "registered already, or for rdma may not be locked; raise `ulimit -l`."
            )
        with self._lock:
            self._regions[address] = size_bytes

    def unregister(self, address: int) -> None:
        """See `Transfer.unregister`. Waits until copies under way there have ended.

        Raises:
            TransferFailed: one did not end; the memory must not be reused before `close`.
        """
        with self._lock:
            size_bytes = self._regions.pop(address)
        code = self._running().batch_unregister_memory([address])
        if self._protocol == "rdma" and code == 0:
            return  # the adapter does not know the memory any more; what was under way there fails when it is tried
        end = time.monotonic() + self._progress_timeout_s + _UNREGISTER_MARGIN_S
        while self._is_touched(address, size_bytes):
            if time.monotonic() > end:
                raise TransferFailed(
                    f"A transfer still moves bytes of the memory at {address:#x}; keep it until the engine is closed."
                )
            self._closed.wait(_POLL_S_MAX)
        if code != 0:
            raise TransferFailed(f"Mooncake could not unregister the memory at {address:#x} (code {code})")

    def submit_read(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_read`."""
        return self._submit(segment, pieces, reading=True)

    def submit_write(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_write`."""
        return self._submit(segment, pieces, reading=False)

    def by_hand(self, segment: str, pieces: Sequence[Piece], *, writing: bool) -> None:
        """None: see `Transfer.by_hand`."""

    def poll(self, handle: Handle) -> Status:
        """See `Transfer.poll`."""
        with self._lock:
            moving = self._moving[handle]
            status = self._advance(moving)
            if status is not Status.PENDING:
                del self._moving[handle]
            return status

    def wait(self, handle: Handle, timeout_s: float) -> Status:
        """See `Transfer.wait`. Sleeps between polls: a busy wait would take the CPU from Mooncake's threads."""
        begin = time.monotonic()
        while (status := self.poll(handle)) is Status.PENDING:
            waited_s = time.monotonic() - begin
            if waited_s >= timeout_s:
                break
            self._closed.wait(min(max(waited_s / 8, _POLL_S_MIN), _POLL_S_MAX, timeout_s - waited_s))
        return status

    def close(self) -> None:
        """See `Transfer.close`.

        Raises:
            TransferFailed: a first contact hangs inside Mooncake; registered memory must stay mapped until exit.
        """
        end = time.monotonic() + _CLOSE_S
        while self._meeting and time.monotonic() < end:
            self._closed.wait(_POLL_S_MAX)
        with self._lock:
            self._engine = None  # Mooncake's destructor cancels what moves and joins its threads
            self._regions.clear()
        self._closed.set()
        if self._meeting:
            raise TransferFailed(
                "Mooncake still tries to reach a peer that does not answer; it ends with this process only."
            )

    def _running(self) -> _Engine:
        if self._engine is None:
            raise TransferFailed("This Mooncake engine has been closed.")
        return self._engine

    def _submit(self, segment: str, pieces: Sequence[Piece], reading: bool) -> Handle:
        engine = self._running()
        moving = _Moving(merge(pieces))
        with self._lock:
            self._check_registered(moving.pieces)
            handle = Handle(next(self._handles))
            self._moving[handle] = moving
            if self._meeting or segment not in self._met:
                self._queue_to_meet(engine, segment, moving, reading)
                return handle
        self._start_pieces(engine, segment, moving, reading)
        if moving.failed and not moving.batches:
            with self._lock:
                del self._moving[handle]
            raise TransferFailed(f"Mooncake does not reach the segment {segment}; is its node running?")
        return handle

    def _queue_to_meet(self, engine: _Engine, segment: str, moving: _Moving, reading: bool) -> None:
        """Has a thread, one per segment, submit; under the lock. For segments not met before, and for all others as
        long as one is being met, since Mooncake holds a lock of its own then."""
        if segment in self._meeting:
            self._meeting[segment].append((moving, reading))
        else:
            self._meeting[segment] = deque([(moving, reading)])
            threading.Thread(
                target=self._meet, args=(engine, segment), name="mooncake-meet", daemon=True
            ).start()

    def _meet(self, engine: _Engine, segment: str) -> None:
        """Submits what is queued. The first contact takes 5 s if there is nobody, 61 s if the peer is stopped; where
        it fails, all that is queued has failed, instead of trying as long again."""
        reached = True
        while True:
            with self._lock:
                if not self._meeting[segment]:
                    del self._meeting[segment]
                    (self._met.add if reached else self._met.discard)(segment)
                    return
                moving, reading = self._meeting[segment].popleft()
            if reached:
                self._start_pieces(engine, segment, moving, reading)
                reached = not moving.failed or bool(moving.batches)
            else:
                moving.failed = True
                moving.starting = False

    def _start_pieces(self, engine: _Engine, segment: str, moving: _Moving, reading: bool) -> None:
        start = engine.batch_transfer_async_read if reading else engine.batch_transfer_async_write
        for local, remote, size_bytes in moving.pieces:
            try:
                batch = start(segment, [local], [remote], [size_bytes])
            except TypeError:  # what a peer gave as an address has more than 64 bits, or a sign
                batch = -1
            if batch in {0, -1, 2**64 - 1}:
                moving.failed = True
                break
            moving.batches.append(batch)
        moving.starting = False

    def _advance(self, moving: _Moving) -> Status:
        """Takes news of the transfer; under the lock. The last piece first: while it moves, no other is asked."""
        if self._engine is None:
            return Status.FAILED
        if moving.starting:
            return Status.PENDING
        while moving.batches:
            code = self._engine.transfer_check_status(moving.batches[-1])
            if code not in {1, -1}:
                return Status.PENDING
            moving.batches.pop()
            moving.failed |= code == -1
        return Status.FAILED if moving.failed else Status.DONE

    def _is_touched(self, address: int, size_bytes: int) -> bool:
        with self._lock:
            return any(
                moving.touches(address, size_bytes) and self._advance(moving) is Status.PENDING
                for moving in self._moving.values()
            )

    def _check_registered(self, pieces: list[Piece]) -> None:
        for local, _, size_bytes in pieces:
            if not any(
                start <= local and local + size_bytes <= start + length
                for start, length in self._regions.items()
            ):
                raise TransferFailed(
                    f"{size_bytes} bytes at {local:#x} lie outside the memory registered with this engine."
                )


def _start(host: str, protocol: str, devices: str) -> _Engine:
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransferFailed(
            f"Mooncake cannot be loaded ({error}). Install exactly one of mooncake-transfer-engine-non-cuda, "
            "mooncake-transfer-engine (CUDA 12), mooncake-transfer-engine-cuda13 with pip, and the Debian packages "
            "libibverbs1 librdmacm1 libnuma1."
        ) from error
    engine = cast("_Engine", module.TransferEngine())
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, devices if protocol == "rdma" else "")
    if code != 0:
        raise TransferFailed(
            f"Mooncake's engine did not start on {host} with {protocol} (code {code}); stderr says why. "
            "Often the host name does not resolve, or all ports of MC_MIN_RPC_PORT to MC_MAX_RPC_PORT are taken."
        )
    return engine
