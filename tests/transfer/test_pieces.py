"""Merging pieces: the same copies, in as few pieces as possible."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer import Piece
from kvstore.transfer.pieces import merge

near = st.integers(0, 12)
pieces = st.lists(st.builds(Piece, near, near.map(lambda n: n + 100), st.integers(0, 3)), max_size=12)


def copies(some: list[Piece]) -> list[tuple[int, int]]:
    """Every byte moved, as (from here, to there), in order."""
    return [(local + n, remote + n) for local, remote, size in some for n in range(size)]


@given(pieces)
def test_the_same_bytes_move_in_the_same_order(some: list[Piece]) -> None:
    assert copies(merge(some)) == copies(some)


@given(pieces)
def test_no_two_neighbours_are_left_and_no_empty_piece(some: list[Piece]) -> None:
    merged = merge(some)
    assert all(piece.size_bytes for piece in merged)
    assert not any(merge([one, other]) != [one, other] for one, other in pairwise(merged))


def test_an_object_in_one_extent_is_one_piece() -> None:
    assert merge([Piece(n * 4096, 70_000 + n * 4096, 4096) for n in range(100)]) == [
        Piece(0, 70_000, 409_600)
    ]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    apart = [Piece(0, 100, 10), Piece(10, 200, 10), Piece(40, 210, 10)]
    assert merge(apart) == apart
