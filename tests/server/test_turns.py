"""Whose frame is next."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from kvstore.server.turns import BYTES_HELD, FRAMES_HELD, SMALL_BYTES, SMALL_IN_A_ROW, Rest, Turns

SMALL, LARGE = bytes(SMALL_BYTES), bytes(SMALL_BYTES + 1)
PEERS = [bytes([number]) for number in range(4)]


def take(turns: Turns[bytes]) -> tuple[bytes, bytes]:
    peer, frame = turns.take()
    assert isinstance(frame, bytes)
    return peer, frame


def take_all(turns: Turns[bytes]) -> list[tuple[bytes, bytes]]:
    return [take(turns) for _ in range(len(turns))]


class Slices:
    """Handles what is taken; a frame ends when it was taken as often as its fifth byte says."""

    def __init__(self, turns: Turns[bytes]) -> None:
        self._turns = turns
        self.ended: list[tuple[bytes, bytes]] = []

    def take(self) -> None:
        peer, frame = self._turns.take()
        rest = self._begin(peer, frame) if isinstance(frame, bytes) else frame()
        if rest is not None:
            self._turns.put_back(peer, rest)

    def _begin(self, peer: bytes, frame: bytes, done: int = 1) -> Rest | None:
        if done < frame[4]:
            return partial(self._begin, peer, frame, done + 1)
        self.ended.append((peer, frame))
        return None


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.booleans(), st.integers(1, 3), st.integers(0, 3))))
def test_nothing_is_lost_and_a_peers_own_frames_stay_in_order(arrivals) -> None:
    """Mutants: a peer's small frames overtake its large ones, or what is left of one; a peer whose frames were all
    taken is lost."""
    turns: Turns[bytes] = Turns()
    slices = Slices(turns)
    put: list[tuple[bytes, bytes]] = []
    for number, (peer, is_small, num_slices, takes) in enumerate(arrivals):
        frame = (number.to_bytes(4, "big") + bytes([num_slices])).ljust(8 if is_small else SMALL_BYTES + 8)
        turns.put(peer, frame)
        put.append((peer, frame))
        for _ in range(min(takes, len(turns))):
            slices.take()
    while turns:
        slices.take()
    assert not turns.full
    for peer in PEERS:
        assert [one for one in slices.ended if one[0] == peer] == [one for one in put if one[0] == peer]


def test_only_what_is_small_comes_before_what_is_left_of_a_frame() -> None:
    """Mutants: `put_back` queues behind the other large ones; or before the small ones."""
    turns: Turns[bytes] = Turns()
    for peer in PEERS[:3]:
        turns.put(peer, LARGE)
    assert take(turns) == (PEERS[0], LARGE)
    turns.put(PEERS[3], SMALL)
    turns.put_back(PEERS[0], lambda: None)
    turns.put(PEERS[0], SMALL)
    taken = [turns.take() for _ in range(len(turns))]
    assert [peer for peer, _ in taken] == [PEERS[3], PEERS[0], PEERS[0], PEERS[1], PEERS[2]]


def test_a_small_frame_does_not_wait_for_the_batches_of_others() -> None:
    turns: Turns[bytes] = Turns()
    for peer in PEERS[:3]:
        turns.put(peer, LARGE)
    turns.put(PEERS[3], SMALL)
    assert turns.take() == (PEERS[3], SMALL)


def test_small_frames_keep_a_large_one_waiting_for_a_bounded_time() -> None:
    """Mutant: small ones always come first."""
    turns: Turns[bytes] = Turns()
    turns.put(PEERS[0], LARGE)
    for _ in range(2 * SMALL_IN_A_ROW):
        turns.put(PEERS[1], SMALL)
    assert [peer for peer, _ in take_all(turns)].index(PEERS[0]) == SMALL_IN_A_ROW


def test_a_peer_that_floods_waits_behind_itself() -> None:
    turns: Turns[bytes] = Turns()
    for _ in range(10):
        turns.put(PEERS[0], LARGE)
    turns.take()
    turns.put(PEERS[1], LARGE)
    assert [peer for peer, _ in take_all(turns)].index(PEERS[1]) == 1


def test_what_is_held_is_bounded_in_frames_and_bytes() -> None:
    turns: Turns[bytes] = Turns()
    fullness = []
    for _ in range(FRAMES_HELD):
        fullness.append(turns.full)
        turns.put(PEERS[0], SMALL)
    assert not any(fullness)
    assert turns.full
    take_all(turns)
    turns.put(PEERS[1], bytes(BYTES_HELD - 1))
    fullness = [turns.full]
    turns.put(PEERS[2], SMALL)
    assert [*fullness, turns.full] == [False, True]
