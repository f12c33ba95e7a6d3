"""Logging of the node: one event, one line, `time level=... at=... message key=value ...`."""

import errno
import logging
import os
import sys
import time

from kvstore.core import BadConfiguration, KVStoreError
from kvstore.node.sections import LogSection

_FULL = (errno.ENOSPC, errno.EDQUOT)


class OneLine(logging.Formatter):
    """Times in UTC; an event never breaks into several lines, not even with a traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s level=%(levelname)s at=%(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """With milliseconds."""
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        """Line breaks become the two characters that stand for them."""
        return super().format(record).replace("\r", "").replace("\n", "\\n")


class LogFile(logging.Handler):
    """A file that is opened for each line: it may be moved away (logrotate), and its disk may be full for a while.
    That is said once on standard error, lines are lost meanwhile, and the next one that is written says how many.

    Raises:
        BadConfiguration: it cannot be opened.
        KVStoreError: it cannot be written now; proved by a first line, since a full disk lets files be opened.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.setFormatter(OneLine())
        self._path = os.path.abspath(path)
        self._lost_lines = 0
        try:
            self._write(_event(logging.INFO, "kvstore starts pid=%d", os.getpid()))
        except OSError as error:
            kind = KVStoreError if error.errno in _FULL else BadConfiguration
            raise kind(self._trouble(error)) from None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, or counts it."""
        try:
            if self._lost_lines:
                self._write(_event(logging.WARNING, "lines of this log were lost lines=%d", self._lost_lines))
            self._write(record)
        except OSError as error:
            if not self._lost_lines:
                print(f"kvstore: {self._trouble(error)}; its lines are lost", file=sys.stderr)  # noqa: T201
            self._lost_lines += 1
        except Exception:  # noqa: BLE001 - as every handler: a line that cannot be made is told on standard error
            self.handleError(record)
        else:
            self._lost_lines = 0

    def _write(self, record: logging.LogRecord) -> None:
        with open(self._path, "ab", buffering=0) as file:
            file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def _trouble(self, error: OSError) -> str:
        return (
            f"log.file: {self._path} cannot be written: {error.strerror}; make room, or name another "
            "(--log-file FILE)"
        )


def start_logging(settings: LogSection) -> None:
    """Sends every log line of this process to the configured place.

    Raises:
        KVStoreError: the file cannot be written, see `LogFile`.
    """
    handler = LogFile(settings.file) if settings.file else logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _event(level: int, text: str, number: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, level, "", 0, text, (number,), None)
