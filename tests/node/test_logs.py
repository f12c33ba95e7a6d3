"""Log lines: one event, one line, whatever happens; and the library noise that is held back."""

import logging
import os
import re
import time

import pytest

from kvstore.core import BadConfiguration, KVStoreError
from kvstore.node.logs import FLUSH_S, LINES_WAITING_MAX, Background, OneLine, flush_logs, start_logging
from kvstore.node.quiet import MOONCAKE_NOISE, without_noise
from kvstore.node.sections import LogSection
from tests.support.full_pipe import FullPipe
from tests.support.waiting import wait_until


@pytest.fixture
def root_logger():
    """The root logger as it was, afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_an_event_is_one_line_even_with_a_traceback(root_logger, tmp_path) -> None:
    file = tmp_path / "node.log"
    start_logging(LogSection(level="warning", file=str(file)))
    log = logging.getLogger("kvstore.store")
    log.info("not written")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("request failed key=%s", "00ff")
    flush_logs()
    _, line = file.read_text().splitlines()
    assert re.match(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=ERROR at=kvstore.store request failed key=00ff", line
    )
    assert "Traceback" in line
    assert "ValueError: two\\nlines" in line


def test_a_file_that_cannot_be_written_is_a_configuration_error() -> None:
    with pytest.raises(BadConfiguration, match=r"log\.file: /proc/nothing/node\.log cannot be written"):
        start_logging(LogSection(file="/proc/nothing/node.log"))


def test_a_full_disk_is_seen_at_the_start() -> None:
    with pytest.raises(KVStoreError, match="/dev/full cannot be written: No space left on device; make room"):
        start_logging(LogSection(file="/dev/full"))


def test_a_disk_that_fills_up_costs_lines_one_line_about_it_and_nothing_else(
    root_logger, tmp_path, capfd
) -> None:
    """And the same with a file that was moved away. Mutants: logging's own handlers, with a traceback a line."""
    file, log = tmp_path / "node.log", logging.getLogger("kvstore.store")
    start_logging(LogSection(file=str(file)))
    log.warning("before")
    flush_logs()
    file.rename(tmp_path / "node.log.1")
    file.symlink_to("/dev/full")
    for _ in range(3):
        log.warning("lost")
    flush_logs()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"kvstore: log.file: {file} cannot be written: No space left on device; make room")
    file.unlink()
    for _ in range(2):
        log.warning("after")
    flush_logs()
    assert [text.partition(" at=")[2] for text in file.read_text().splitlines()] == [
        "kvstore.node.logs lines of this log were lost lines=3",
        "kvstore.store after",
        "kvstore.store after",
    ]
    assert capfd.readouterr().err == ""


def test_a_log_that_cannot_be_written_stops_nobody(root_logger, tmp_path) -> None:
    """A pipe that is full and that nobody reads. Mutants: handlers that write where the line is logged; a queue
    without bound; an end that waits for ever; lines that are lost in silence."""
    pipe = FullPipe(tmp_path / "pipe")
    start_logging(LogSection(file=str(pipe.path)))
    (handler,) = root_logger.handlers
    assert isinstance(handler, Background)
    pipe.fill()
    log = logging.getLogger("kvstore.store")
    log.warning("line 0")
    wait_until(lambda: handler.waiting.empty() and handler.waiting.unfinished_tasks)  # it is being written
    for number in range(1, LINES_WAITING_MAX + 4):
        log.warning("line %d", number)
    began_s = time.monotonic()
    flush_logs()
    assert time.monotonic() - began_s >= FLUSH_S
    assert handler.waiting.unfinished_tasks == LINES_WAITING_MAX + 1, "something was written to a full pipe"
    lines = pipe.read_until(f"line {LINES_WAITING_MAX}")
    log.warning("afterwards")
    lines += pipe.read_until("afterwards")
    assert [line.partition(" at=")[2] for line in lines] == [
        *(f"kvstore.store line {number}" for number in range(LINES_WAITING_MAX + 1)),
        "kvstore.node.logs lines of this log were lost lines=3",
        "kvstore.store afterwards",
    ]
    pipe.close()


def test_times_are_utc() -> None:
    record = logging.LogRecord("kvstore", logging.INFO, "", 0, "hello", (), None)
    record.created, record.msecs = 0.5, 500.0
    assert OneLine().format(record) == "1970-01-01T00:00:00.500Z level=INFO at=kvstore hello"


def test_only_noise_is_dropped_from_standard_error(capfd) -> None:
    with without_noise(MOONCAKE_NOISE):
        os.write(2, b"E1 transfer_metadata.cpp:1098] Local segment descriptor not found\n")
        os.write(2, b"E1 transfer_metadata.cpp:7] a real error\n")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "E1 transfer_metadata.cpp:7] a real error\nafterwards\n"


def test_standard_error_comes_back_after_an_exception(capfd) -> None:
    def fail() -> None:
        with without_noise(MOONCAKE_NOISE):
            os.write(2, b"said before it failed\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert capfd.readouterr().err == "said before it failed\n"
