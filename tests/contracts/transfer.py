"""What every `Transfer` keeps, run against each implementation.

A test file of an implementation subclasses `TransferSuite` and gives it the fixtures `rig` (may serve many
tests, must be left healthy) and `fragile_rig` (one test may break its peer).

Mutants that this suite must kill: a handle that looks at its first piece only; FAILED forgotten when a later
piece is done; `unregister` that returns while a copy is under way; `wait` that ignores its timeout;
a submission that blocks until a stopped peer answers; a piece off by one byte.
"""

import threading
import time
from abc import ABC, abstractmethod
from random import Random

import pytest

from kvstore.core import TransferFailed
from kvstore.transfer import Handle, Piece, Status, Transfer
from tests.contracts.transfer_memory import Memory

MIB = 1 << 20
SIZE = 64 * MIB
END_S = 20.0
AT_ONCE_S = 3.0  # generous for a busy machine; a blocked call takes 5 s and more


class Rig(ABC):
    """Two ends: `transfer` with `local` memory registered, and a peer with `remote` memory of the same size.

    `remote.address` is the address in the peer; its bytes can be looked at here. `unregistered` is local memory
    that the transfer does not know.
    """

    transfer: Transfer
    local: Memory
    remote: Memory
    remote_address: int
    segment: str

    def piece(self, local: int, remote: int, size_bytes: int) -> Piece:
        """A piece by offsets."""
        return Piece(self.local.address + local, self.remote_address + remote, size_bytes)

    def write(self, *pieces: Piece) -> Status:
        return self.end(self.transfer.submit_write(self.segment, pieces))

    def read(self, *pieces: Piece) -> Status:
        return self.end(self.transfer.submit_read(self.segment, pieces))

    def end(self, handle: Handle) -> Status:
        """Waits for the end of a transfer, which must come."""
        status = self.transfer.wait(handle, END_S)
        assert status is not Status.PENDING, "the transfer did not end"
        return status

    @abstractmethod
    def stop(self) -> None:
        """From now on transfers do not get on, until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """They go on."""

    @abstractmethod
    def kill(self) -> None:
        """The peer is gone."""

    @abstractmethod
    def unregister_remote(self) -> None:
        """The peer withdraws its memory."""

    @abstractmethod
    def another(self) -> Transfer:
        """A second end here, with the local memory registered, that has not spoken to the peer."""


class TransferSuite:
    """The clauses of kvstore/transfer/base.py."""

    @pytest.fixture(autouse=True)
    def _quiet_memory(self, rig: Rig) -> None:
        rig.local.fill(0)
        rig.remote.fill(0)

    def test_a_write_puts_exactly_these_bytes_there(self, rig: Rig) -> None:
        rig.local[:SIZE] = Random(1).randbytes(MIB) * (SIZE // MIB)
        assert rig.write(rig.piece(4096, 8192 + 5, 3 * MIB + 7)) is Status.DONE
        assert rig.remote[8197 : 8197 + 3 * MIB + 7] == rig.local[4096 : 4096 + 3 * MIB + 7]
        assert not any(rig.remote[:8197]) and not any(rig.remote[8197 + 3 * MIB + 7 : 5 * MIB])

    def test_a_read_brings_exactly_these_bytes_here(self, rig: Rig) -> None:
        rig.remote[:SIZE] = Random(2).randbytes(MIB) * (SIZE // MIB)
        assert rig.read(rig.piece(11, 4096, 2 * MIB + 1)) is Status.DONE
        assert rig.local[11 : 11 + 2 * MIB + 1] == rig.remote[4096 : 4096 + 2 * MIB + 1]
        assert not any(rig.local[:11]) and not any(rig.local[11 + 2 * MIB + 1 : 4 * MIB])

    @pytest.mark.parametrize("reading", [False, True])
    def test_done_means_all_pieces_are_there(self, rig: Rig, reading: bool) -> None:
        """Small pieces first and a large one last, then the other way round: no piece speaks for the others."""
        random = Random(3)
        source, target = (rig.remote, rig.local) if reading else (rig.local, rig.remote)
        source[:SIZE] = random.randbytes(MIB) * (SIZE // MIB)
        sizes = [random.randrange(1, 9000) for _ in range(300)] + [24 * MIB]
        for ordered in (sizes, sizes[::-1]):
            target.fill(0)
            offset, pieces = 0, []
            for size in ordered:
                pieces.append(rig.piece(offset, offset, size))
                offset += size + random.choice([0, 1, 500])
            random.shuffle(pieces)
            pieces.sort(key=lambda piece: piece.size_bytes == 24 * MIB, reverse=ordered is not sizes)
            submit = rig.transfer.submit_read if reading else rig.transfer.submit_write
            assert rig.end(submit(rig.segment, pieces)) is Status.DONE
            for piece in pieces:
                start = piece.local_address - rig.local.address
                where = slice(start, start + piece.size_bytes)
                assert target[where] == source[where]

    @pytest.mark.parametrize("reading", [False, True])
    def test_by_hand_the_same_bytes_move_in_the_callers_steps(self, rig: Rig, reading: bool) -> None:
        """Or not at all by hand. Steps do not end where pieces do; nothing moves before it is asked to."""
        source, target = (rig.remote, rig.local) if reading else (rig.local, rig.remote)
        source[:SIZE] = Random(4).randbytes(MIB) * (SIZE // MIB)
        assert (rig.read if reading else rig.write)(rig.piece(0, 0, 1)) is Status.DONE
        pieces = [rig.piece(MIB, MIB, 5 * MIB + 3), rig.piece(0, 0, 0), rig.piece(8 * MIB, 9 * MIB, 4096)]
        copy = rig.transfer.by_hand(rig.segment, pieces, writing=not reading)
        if copy is None:
            return
        begun = pieces[0].size_bytes + 4095
        assert not any(target[MIB : 2 * MIB])
        assert copy.move(7) and copy.move(begun - 7)
        copy.close()
        assert target[MIB : 6 * MIB + 3] == source[MIB : 6 * MIB + 3]
        there, here = (9 * MIB, 8 * MIB) if reading else (8 * MIB, 9 * MIB)
        assert target[here : here + 4096] == source[there : there + 4095] + bytes(1)

    def test_by_hand_nothing_moves_when_its_memory_was_unregistered(self, rig: Rig) -> None:
        memory = Memory(MIB)
        rig.transfer.register(memory.address, MIB)
        piece = Piece(memory.address, rig.remote_address, MIB)
        assert rig.write(piece) is Status.DONE
        copy = rig.transfer.by_hand(rig.segment, [piece], writing=True)
        assert copy is None or copy.move(4096)
        rig.transfer.unregister(memory.address)
        memory.fill(9)
        if copy is not None:
            assert not copy.move(4096)
            copy.close()
            with pytest.raises(TransferFailed):
                rig.transfer.by_hand(rig.segment, [piece], writing=True)
        assert not any(rig.remote[:MIB])

    def test_nothing_to_move_is_done(self, rig: Rig) -> None:
        assert rig.write() is Status.DONE
        assert rig.read(rig.piece(0, 0, 0)) is Status.DONE

    @pytest.mark.parametrize(("bad", "offset"), [(0, SIZE), (1, SIZE - 4095), (2, -4096)])
    def test_an_address_outside_the_peers_memory_fails_and_does_no_harm(
        self, rig: Rig, bad: int, offset: int
    ) -> None:
        rig.local.fill(7)
        pieces = [rig.piece(0, 0, 4096), rig.piece(8192, 8192, 4096)]
        pieces.insert(bad, rig.piece(MIB, offset, 4096))
        assert rig.write(*pieces) is Status.FAILED
        start, end = rig.remote.written(16384)
        assert start == end or start >= offset > 0, f"bytes {start} to {end} of the peer's memory changed"
        assert rig.read(*pieces) is Status.FAILED
        assert rig.write(rig.piece(0, 0, MIB)) is Status.DONE

    def test_local_memory_must_be_registered(self, rig: Rig) -> None:
        stranger = Memory(8192)
        for piece in (
            Piece(stranger.address, rig.remote_address, 4096),
            rig.piece(SIZE - 4095, 0, 4096),
            rig.piece(-1, 0, 4096),
        ):
            with pytest.raises(TransferFailed):
                rig.transfer.submit_write(rig.segment, [piece])
        assert not any(rig.remote[:8192])

    def test_memory_is_registered_once(self, rig: Rig) -> None:
        memory = Memory(MIB)
        rig.transfer.register(memory.address, MIB)
        with pytest.raises(TransferFailed):
            rig.transfer.register(memory.address, MIB)
        rig.transfer.unregister(memory.address)
        rig.transfer.register(memory.address, MIB)
        assert rig.write(Piece(memory.address, rig.remote_address, MIB)) is Status.DONE
        rig.transfer.unregister(memory.address)
        with pytest.raises(TransferFailed):
            rig.transfer.submit_write(rig.segment, [Piece(memory.address, rig.remote_address, MIB)])

    def test_a_segment_that_is_not_there_fails(self, rig: Rig) -> None:
        """By raising, or in the end: the caller is told, and other peers are served meanwhile."""
        try:
            handle = rig.transfer.submit_write("127.0.0.1:1", [rig.piece(0, 0, 4096)])
        except TransferFailed:
            pass
        else:
            assert rig.end(handle) is Status.FAILED
        assert rig.write(rig.piece(0, 0, 4096)) is Status.DONE

    def test_many_threads_may_submit(self, rig: Rig) -> None:
        share = SIZE // 8
        rig.local[:SIZE] = b"".join(bytes([n + 1]) * share for n in range(8))
        outcomes: list[list[Status]] = [[] for _ in range(8)]

        def move(n: int) -> None:
            for at in range(n * share, (n + 1) * share, MIB):
                half = MIB // 2
                outcomes[n].append(rig.write(rig.piece(at, at, half), rig.piece(at + half, at + half, half)))

        threads = [threading.Thread(target=move, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == [[Status.DONE] * 8] * 8
        assert rig.remote[:SIZE] == rig.local[:SIZE]

    def test_a_stopped_peer_leaves_the_transfer_pending_and_the_caller_free(self, rig: Rig) -> None:
        rig.remote.fill(9)
        assert rig.write(rig.piece(0, 0, 1)) is Status.DONE  # connected
        rig.stop()
        begin = time.monotonic()
        handle = rig.transfer.submit_read(rig.segment, [rig.piece(0, 4096, SIZE - 4096)])
        assert rig.transfer.wait(handle, 0.2) is Status.PENDING
        assert rig.transfer.poll(handle) is Status.PENDING
        assert time.monotonic() - begin < AT_ONCE_S
        rig.resume()
        if rig.end(handle) is Status.DONE:
            assert rig.local[: SIZE - 4096] == rig.remote[4096:SIZE]
        assert rig.write(rig.piece(0, 0, MIB)) is Status.DONE

    def test_unregistering_stops_late_bytes(self, rig: Rig) -> None:
        """The memory is the caller's again, whatever the peer does with the transfer that was under way."""
        rig.remote.fill(9)
        memory = Memory(SIZE)
        rig.transfer.register(memory.address, SIZE)
        assert rig.read(Piece(memory.address, rig.remote_address, 4096)) is Status.DONE
        rig.stop()
        handle = rig.transfer.submit_read(rig.segment, [Piece(memory.address, rig.remote_address, SIZE)])
        assert rig.transfer.poll(handle) is Status.PENDING
        rig.transfer.unregister(memory.address)
        memory.fill(5)
        rig.resume()
        assert rig.end(handle) is Status.FAILED
        assert rig.write(rig.piece(0, 0, MIB)) is Status.DONE  # the peer is alive and has drained what it had
        assert memory.is_all(5)

    def test_a_killed_peer_fails_the_transfer_for_good(self, fragile_rig: Rig) -> None:
        rig = fragile_rig
        assert rig.write(rig.piece(0, 0, MIB)) is Status.DONE
        rig.stop()
        handles = [rig.transfer.submit_read(rig.segment, [rig.piece(n * MIB, 0, MIB)]) for n in range(20)]
        rig.kill()
        ends = [rig.end(handle) for handle in handles]
        assert Status.FAILED in ends
        rig.local.fill(3)
        try:
            handle = rig.transfer.submit_read(rig.segment, [rig.piece(0, 0, MIB)])
        except TransferFailed:
            pass
        else:
            assert rig.end(handle) is Status.FAILED
        assert rig.local.is_all(3)

    def test_the_first_contact_does_not_block_either(self, fragile_rig: Rig) -> None:
        """Nor do the next ones, and when it fails they fail with it instead of trying in turn."""
        rig = fragile_rig
        other = rig.another()
        rig.stop()
        begin, threads = time.monotonic(), threading.active_count()
        handles = [other.submit_read(rig.segment, [rig.piece(n * MIB, 0, MIB)]) for n in range(10)]
        assert [other.wait(handle, 0.01) for handle in handles] == [Status.PENDING] * 10
        assert time.monotonic() - begin < AT_ONCE_S
        assert threading.active_count() <= threads + 1
        rig.kill()
        assert [other.wait(handle, END_S) for handle in handles] == [Status.FAILED] * 10
        other.close()

    def test_what_was_submitted_before_the_first_contact_arrives(self, fragile_rig: Rig) -> None:
        rig = fragile_rig
        rig.remote[:SIZE] = Random(5).randbytes(MIB) * (SIZE // MIB)
        other = rig.another()
        handles = [other.submit_read(rig.segment, [rig.piece(n * MIB, n * MIB, MIB)]) for n in range(64)]
        assert [other.wait(handle, END_S) for handle in handles] == [Status.DONE] * 64
        assert rig.local[:SIZE] == rig.remote[:SIZE]
        other.close()

    @pytest.mark.parametrize("address", [-4096, 2**64])
    def test_what_is_no_address_at_all_fails_and_does_no_harm(self, fragile_rig: Rig, address: int) -> None:
        """At the first contact, too: whatever a peer says, later transfers arrive."""
        rig = fragile_rig
        bad = rig.piece(0, 0, 4096)._replace(remote_address=address)
        assert rig.read(bad) is Status.FAILED
        rig.local.fill(7)
        assert rig.write(rig.piece(0, 0, 4096)) is Status.DONE

    def test_memory_that_the_peer_withdrew_is_out_of_reach(self, fragile_rig: Rig) -> None:
        rig = fragile_rig
        rig.local.fill(1)
        assert rig.write(rig.piece(0, 0, 4096)) is Status.DONE
        rig.unregister_remote()
        assert rig.write(rig.piece(0, MIB, 4096)) is Status.FAILED
        assert not any(rig.remote[MIB : MIB + 4096])

    def test_after_close_everything_has_ended(self, rig: Rig) -> None:
        rig.remote.fill(9)
        other = rig.another()
        handle = other.submit_read(rig.segment, [rig.piece(0, 0, 1)])
        assert other.wait(handle, END_S) is Status.DONE
        rig.stop()
        handle = other.submit_read(rig.segment, [rig.piece(0, 0, SIZE)])
        other.close()
        rig.local.fill(5)
        rig.resume()
        assert other.poll(handle) is Status.FAILED
        with pytest.raises(TransferFailed):
            other.submit_write(rig.segment, [rig.piece(0, 0, 1)])
        assert rig.write(rig.piece(0, 0, 1)) is Status.DONE
        assert rig.local.is_all(5)
