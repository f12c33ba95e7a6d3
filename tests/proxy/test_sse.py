"""Events come out whole, and the same ones however the bytes were cut."""

import pytest

from kvstore.proxy.sse import EventSplitter, EventTooLarge, write_event

STREAM = b'data: {"a": 1}\n\n: a comment\n\ndata: {"b":\r\ndata:  2}\r\n\r\nevent: x\nid: 7\ndata:[DONE]\n\n'
DATA = [b'{"a": 1}', b"", b'{"b":\n 2}', b"[DONE]"]


def test_data_is_what_the_data_lines_say() -> None:
    events = EventSplitter(1_000).feed(STREAM)
    assert [event.data for event in events] == DATA
    assert b"".join(event.raw for event in events) == STREAM


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_any_cut_gives_the_same_events(size) -> None:
    splitter = EventSplitter(1_000)
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event.data for piece in pieces for event in splitter.feed(piece)] == DATA
    assert splitter.pending == 0


def test_what_has_not_ended_is_never_given_out() -> None:
    """Mutant: giving out at the end of the data line instead of at the empty line."""
    whole = EventSplitter(1_000).feed(STREAM)
    for cut in range(len(STREAM) + 1):
        splitter = EventSplitter(1_000)
        events = splitter.feed(STREAM[:cut])
        assert events == whole[: len(events)]
        assert sum(len(event.raw) for event in events) + splitter.pending == cut


def test_an_event_is_bounded() -> None:
    splitter = EventSplitter(100)
    splitter.feed(b"data: " + b"x" * 94)
    with pytest.raises(EventTooLarge, match="100 bytes"):
        splitter.feed(b"x")


def test_an_event_of_ours_is_read_back() -> None:
    assert EventSplitter(100).feed(write_event(b"{}"))[0].data == b"{}"
