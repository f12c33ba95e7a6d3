"""Logging of the node: one event, one line, `time level=... at=... message key=value ...`.

Whoever logs, which is mostly the control loop, waits for nobody: a thread of its own writes the lines, so a disk that
hangs, or a pipe that nobody reads, stops that thread alone.
"""

import contextlib
import errno
import logging
import os
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue

from kvstore.core import BadConfiguration, KVStoreError
from kvstore.node.sections import LogSection

LINES_WAITING_MAX = 10_000
FLUSH_S = 2.0  # for the last lines of a process that ends
_STDERR = 2
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


class StandardError(logging.Handler):
    """Past `sys.stderr`, whose lock the end of the process waits for: a write that hangs would keep it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            os.write(_STDERR, _line(self.format(record)))
        except Exception:  # noqa: BLE001 - as every handler
            self.handleError(record)


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
                self._write(_lost(self._lost_lines))
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
            file.write(_line(self.format(record)))

    def _trouble(self, error: OSError) -> str:
        return (
            f"log.file: {self._path} cannot be written: {error.strerror}; make room, or name another "
            "(--log-file FILE)"
        )


class Background(QueueHandler):
    """Lines wait here for a thread that writes them to `sink`. When too many wait further ones are lost, and the next
    one that finds room says how many."""

    def __init__(self, sink: logging.Handler) -> None:
        self.waiting: Queue[logging.LogRecord] = Queue(LINES_WAITING_MAX)
        super().__init__(self.waiting)
        self.setFormatter(logging.Formatter())  # of the message alone: the sink makes the line
        self._lost_lines = 0
        sink.lock = None  # one thread uses it, and the end of the process must not wait for that
        self._listener = QueueListener(self.waiting, sink)
        self._listener.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Takes a line, or counts it."""
        try:
            if self._lost_lines:
                self.waiting.put_nowait(_lost(self._lost_lines))
                self._lost_lines = 0
            self.waiting.put_nowait(record)
        except Full:
            self._lost_lines += 1

    def flush(self) -> None:
        """Returns when all lines are written, or `FLUSH_S` have passed. The interpreter calls it when it ends."""
        with self.waiting.all_tasks_done:
            self.waiting.all_tasks_done.wait_for(lambda: not self.waiting.unfinished_tasks, FLUSH_S)

    def close(self) -> None:
        """Ends the thread, once it has written what waits."""
        with contextlib.suppress(Full):  # then it hangs, and ends with the process
            self._listener.enqueue_sentinel()
        super().close()


def start_logging(settings: LogSection) -> None:
    """Sends every log line of this process to the configured place, through a thread of its own: see `flush_logs`.

    Raises:
        KVStoreError: the file cannot be written, see `LogFile`.
    """
    sink = LogFile(settings.file) if settings.file else StandardError()
    sink.setFormatter(OneLine())
    logging.basicConfig(level=settings.level.upper(), handlers=[Background(sink)], force=True)
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def flush_logs() -> None:
    """Before anything else is said, or the process ends otherwise than by itself: what was logged is written."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _line(text: str) -> bytes:
    return f"{text}\n".encode(errors="backslashreplace")


def _lost(lines: int) -> logging.LogRecord:
    return _event(logging.WARNING, "lines of this log were lost lines=%d", lines)


def _event(level: int, text: str, number: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, level, "", 0, text, (number,), None)
