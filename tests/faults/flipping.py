"""A transfer that damages what it moves, around a real one."""

from collections.abc import Callable, Mapping, Sequence

from kvstore.transfer import HandCopy, Handle, Piece, Status, Transfer

Damage = Callable[[Sequence[Piece]], None]


def harmless(_: Sequence[Piece]) -> None:
    """Damages nothing."""


class _Damaging:
    """A copy by hand of objects that are one portion: damaged behind the copy, before anybody looks."""

    def __init__(self, copy: HandCopy, pieces: Sequence[Piece], damage: Damage) -> None:
        self._copy = copy
        self._pieces = pieces
        self._damage = damage
        self.close = copy.close

    def move(self, size_bytes: int) -> bool:
        assert size_bytes == sum(piece.size_bytes for piece in self._pieces), "more than one portion"
        moved = self._copy.move(size_bytes)
        if moved:
            self._damage(self._pieces)
        return moved


class FlippingTransfer:
    """Everything goes through `real`. Each hook gets the pieces of a transfer and may damage their bytes.

    `received` is called when a read has arrived, before its client is told. `sent` is called when a write has
    arrived at the node, before its client has even been told that it was submitted, so before it hashes.
    """

    def __init__(self, real: Transfer) -> None:
        self.protocol = real.protocol
        self.sent: Damage | None = None
        self.received: Damage = harmless
        self._real = real
        self._reading: dict[Handle, Sequence[Piece]] = {}
        self._ended: dict[Handle, Status] = {}

    @property
    def segment(self) -> str:
        return self._real.segment

    def reach(self, segments: Mapping[str, str]) -> str:
        return self._real.reach(segments)

    def register(self, address: int, size_bytes: int) -> None:
        self._real.register(address, size_bytes)

    def unregister(self, address: int) -> None:
        self._real.unregister(address)

    def submit_read(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        handle = self._real.submit_read(segment, pieces)
        self._reading[handle] = pieces
        return handle

    def submit_write(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        handle = self._real.submit_write(segment, pieces)
        if self.sent is not None:
            self._ended[handle] = self._real.wait(handle, 10.0)
            assert self._ended[handle] is Status.DONE, "the write that was to be damaged failed by itself"
            self.sent(pieces)
        return handle

    def by_hand(self, segment: str, pieces: Sequence[Piece], *, writing: bool) -> HandCopy | None:
        copy = self._real.by_hand(segment, pieces, writing=writing)
        return copy and _Damaging(copy, pieces, self.sent or harmless if writing else self.received)

    def poll(self, handle: Handle) -> Status:
        return self._ended.pop(handle, None) or self._arrived(handle, self._real.poll(handle))

    def wait(self, handle: Handle, timeout_s: float) -> Status:
        return self._ended.pop(handle, None) or self._arrived(handle, self._real.wait(handle, timeout_s))

    def close(self) -> None:
        self._real.close()

    def _arrived(self, handle: Handle, status: Status) -> Status:
        if status is not Status.PENDING and (pieces := self._reading.pop(handle, None)) is not None:
            self.received(pieces)
        return status
