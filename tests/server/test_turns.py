"""Whose frame is next."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.server.turns import BYTES_HELD, FRAMES_HELD, SMALL_BYTES, SMALL_IN_A_ROW, Turns

SMALL, LARGE = bytes(SMALL_BYTES), bytes(SMALL_BYTES + 1)
PEERS = [bytes([number]) for number in range(4)]


def take_all(turns: Turns) -> list[tuple[bytes, bytes]]:
    return [turns.take() for _ in range(len(turns))]


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.booleans(), st.integers(0, 3))))
def test_nothing_is_lost_and_a_peers_own_frames_stay_in_order(arrivals) -> None:
    """Mutants: a peer's small frames overtake its large ones; a peer whose frames were all taken is lost."""
    turns = Turns()
    put: list[tuple[bytes, bytes]] = []
    taken: list[tuple[bytes, bytes]] = []
    for number, (peer, is_small, takes) in enumerate(arrivals):
        frame = number.to_bytes(4, "big").ljust(8 if is_small else SMALL_BYTES + 8)
        turns.put(peer, frame)
        put.append((peer, frame))
        taken += [turns.take() for _ in range(min(takes, len(turns)))]
    taken += take_all(turns)
    assert len(turns) == 0
    for peer in PEERS:
        assert [one for one in taken if one[0] == peer] == [one for one in put if one[0] == peer]


def test_a_small_frame_does_not_wait_for_the_batches_of_others() -> None:
    turns = Turns()
    for peer in PEERS[:3]:
        turns.put(peer, LARGE)
    turns.put(PEERS[3], SMALL)
    assert turns.take() == (PEERS[3], SMALL)


def test_small_frames_keep_a_large_one_waiting_for_a_bounded_time() -> None:
    """Mutant: small ones always come first."""
    turns = Turns()
    turns.put(PEERS[0], LARGE)
    for _ in range(2 * SMALL_IN_A_ROW):
        turns.put(PEERS[1], SMALL)
    assert [peer for peer, _ in take_all(turns)].index(PEERS[0]) == SMALL_IN_A_ROW


def test_a_peer_that_floods_waits_behind_itself() -> None:
    turns = Turns()
    for _ in range(10):
        turns.put(PEERS[0], LARGE)
    turns.take()
    turns.put(PEERS[1], LARGE)
    assert [peer for peer, _ in take_all(turns)].index(PEERS[1]) == 1


def test_what_is_held_is_bounded_in_frames_and_bytes() -> None:
    turns = Turns()
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
