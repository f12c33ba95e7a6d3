"""Frames in a stream whose bytes come in any pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import BadRequest, limits
from kvstore.stream import LENGTH_BYTES, PREAMBLE, FrameReader, framed


def read(reader: FrameReader) -> list[bytes]:
    frames = []
    while (frame := reader.take()) is not None:
        frames.append(frame)
    return frames


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1))
def test_frames_come_whole_and_in_order_however_their_bytes_are_cut(frames, cuts) -> None:
    """Mutants: a piece is a frame; what follows a frame in its piece is lost; a frame of nothing is none."""
    data = PREAMBLE + b"".join(map(framed, frames))
    reader, came, at = FrameReader(), list[bytes](), 0
    while at < len(data):
        size = cuts[at % len(cuts)]
        reader.feed(data[at : at + size])
        at += size
        came += read(reader)
    assert came == frames
    assert reader.greeted


@pytest.mark.parametrize("wrong", range(len(PREAMBLE)))
def test_something_else_is_refused_at_its_first_wrong_byte(wrong) -> None:
    """Mutants: wait for all eight bytes; compare the first alone."""
    reader = FrameReader()
    reader.feed(PREAMBLE[:wrong])
    assert reader.take() is None
    reader.feed(bytes([PREAMBLE[wrong] ^ 1]))
    with pytest.raises(BadRequest, match="does not speak this protocol"):
        reader.take()
    assert not reader.greeted


def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    """Mutants: refuse it when all of it is there; refuse the longest that is allowed."""
    reader = FrameReader()
    reader.feed(PREAMBLE + limits.FRAME_BYTES_MAX.to_bytes(LENGTH_BYTES, "little"))
    assert reader.take() is None
    reader = FrameReader()
    reader.feed(PREAMBLE + (limits.FRAME_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "little"))
    with pytest.raises(BadRequest, match="are allowed"):
        reader.take()


def test_nothing_is_a_frame_before_the_preamble() -> None:
    reader = FrameReader()
    reader.feed(PREAMBLE[:-1])
    assert reader.take() is None
    assert not reader.greeted
    reader.feed(PREAMBLE[-1:] + framed(b"first"))
    assert reader.take() == b"first"
