"""Server-sent events, from bytes in any cut to whole events. Pure.

A stream that breaks off leaves part of an event behind; what has not ended is never given out.
"""

from typing import NamedTuple

DONE = b"[DONE]"


class Event(NamedTuple):
    """One event: `raw` as it came, with the empty line that ends it; `data` is what its `data:` lines say."""

    raw: bytes
    data: bytes


class EventTooLarge(Exception):
    """An event does not end within the bound."""


class EventSplitter:
    """Feed bytes, get the events that are complete."""

    def __init__(self, event_bytes_max: int) -> None:
        self._event_bytes_max = event_bytes_max
        self._buffer = bytearray()
        self._line_from = 0  # where the line begins that has not ended yet

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete.

        Raises:
            EventTooLarge: the event under way has grown beyond the bound.
        """
        self._buffer += data
        events = []
        while (end := self._buffer.find(b"\n", self._line_from)) >= 0:
            line = bytes(self._buffer[self._line_from : end])
            self._line_from = end + 1
            if line in (b"", b"\r"):
                events.append(_event(bytes(self._buffer[: self._line_from])))
                del self._buffer[: self._line_from]
                self._line_from = 0
        if len(self._buffer) > self._event_bytes_max:
            raise EventTooLarge(f"more than {self._event_bytes_max} bytes without an end")
        return events

    @property
    def pending(self) -> int:
        """Bytes of an event that has not ended."""
        return len(self._buffer)


def _event(raw: bytes) -> Event:
    lines = raw.replace(b"\r\n", b"\n").split(b"\n")
    said = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return Event(raw, b"\n".join(said))


def write_event(data: bytes) -> bytes:
    """The bytes of an event; `data` is one line."""
    assert b"\n" not in data, "JSON of ours is one line"
    return b"data: " + data + b"\n\n"
