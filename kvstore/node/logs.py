"""Logging of the node: one event, one line, `time level=... at=... message key=value ...`."""

import logging
import logging.handlers
import time

from kvstore.core import BadConfiguration
from kvstore.node.sections import LogSection


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


def start_logging(settings: LogSection) -> None:
    """Sends every log line of this process to the configured place.

    Raises:
        BadConfiguration: the file cannot be opened.
    """
    try:
        handler: logging.Handler = (
            logging.handlers.WatchedFileHandler(settings.file) if settings.file else logging.StreamHandler()
        )
    except OSError as error:
        raise BadConfiguration(f"log.file: {settings.file} cannot be written: {error.strerror}") from None
    handler.setFormatter(OneLine())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
