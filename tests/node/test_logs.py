"""Log lines: one event, one line, whatever happens; and the library noise that is held back."""

import logging
import os
import re

import pytest

from kvstore.core import BadConfiguration
from kvstore.node.logs import OneLine, start_logging
from kvstore.node.quiet import MOONCAKE_NOISE, without_noise
from kvstore.node.sections import LogSection


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
    (line,) = file.read_text().splitlines()
    assert re.match(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=ERROR at=kvstore.store request failed key=00ff", line
    )
    assert "Traceback" in line
    assert "ValueError: two\\nlines" in line


def test_a_file_that_cannot_be_written_is_a_configuration_error() -> None:
    with pytest.raises(BadConfiguration, match=r"log\.file: /proc/nothing/node\.log cannot be written"):
        start_logging(LogSection(file="/proc/nothing/node.log"))


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
