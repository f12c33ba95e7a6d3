"""What the scheduler half counts. Tokens are of prompts, beyond what the local prefix cache had.

Everything is counted twice: since the engine's start, for whoever holds the half in his hand, and since the last
question, for vLLM's own metrics (`connector.metrics`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from connector.compat import logger
from connector.control import ReportLine
from connector.metadata import LoadReport, SaveReport
from connector.metrics import EngineStats
from kvstore.core import MissReason, limits

log = logger(__name__)


class Cause(StrEnum):
    """Why something was not saved, unless a node refused it: in words, and in metrics by name."""

    PINNED_SHARE = "saves under way hold as many KV blocks as pinned_share allows"
    NODE_DOWN = "no node answered the reservation"
    RESERVATION_EXPIRED = "the reservation ran out before it could be used"
    OTHER_ENGINE = "another engine is saving it"
    NOT_WRITTEN = "its bytes could not be written"
    NOT_COMMITTED = "its commit was not accepted or not answered"
    NO_REPORT = "a worker did not report in time"
    INVALID = "its KV turned out to be invalid"
    RESET = "the engine's cache was reset"
    INTERNAL_ERRORS = "internal errors have switched the store off"


def refused(reason: MissReason | None) -> str:
    """The cause of what a node did not take. Without a reason another engine is at it."""
    return Cause.OTHER_ENGINE if reason is None else f"refused: {reason}"


def _label(cause: str) -> str:
    if isinstance(cause, Cause):
        return cause.name.lower()
    return cause.removeprefix("refused: ") if cause.startswith("refused: ") else "other"


@dataclass(slots=True)
class Stats:
    """Counters since the engine's start. `disk_tokens` are those of the pulled ones that came from NVMe; `dropped`
    counts objects that were not saved, by cause."""

    queried_tokens: int = 0
    promised_tokens: int = 0
    pulled_tokens: int = 0
    disk_tokens: int = 0
    loads: int = 0
    loads_failed: int = 0
    offered_objects: int = 0
    committed_objects: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    fresh: EngineStats = field(default_factory=EngineStats)
    _lines: list[ReportLine] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def count(self, line: ReportLine) -> None:
        """One request's outcome."""
        self.queried_tokens += line.queried_tokens
        self.promised_tokens += line.promised_tokens
        self.pulled_tokens += line.pulled_tokens
        self.disk_tokens += line.disk_tokens
        if line.reason is not None:
            self.misses[line.reason] += 1
        if len(self._lines) < limits.REPORTS_PER_CALL_MAX:
            self._lines.append(line)
        self.fresh.add("queried_tokens", line.queried_tokens)
        self.fresh.add("promised_tokens", line.promised_tokens)
        self.fresh.add("pulled_tokens", line.pulled_tokens - line.disk_tokens, "host")
        self.fresh.add("pulled_tokens", line.disk_tokens, "disk")
        missed = line.queried_tokens - line.pulled_tokens
        self.fresh.add("missed_tokens", missed, str(line.reason or MissReason.TOO_SHORT))

    def take_lines(self) -> list[ReportLine]:
        """The outcomes since the last call, for the node; at most what one report may hold."""
        lines, self._lines = self._lines, []
        return lines

    def take_fresh(self) -> EngineStats | None:
        """What was counted since the last call, for vLLM's metrics; None: nothing."""
        if self.fresh.is_empty():
            return None
        fresh, self.fresh = self.fresh, EngineStats()
        return fresh

    def loaded(self, reports: Sequence[LoadReport]) -> None:
        """A load has ended on all ranks; it took as long as on the slowest."""
        self.fresh.add("bytes", sum(report.moved_bytes for report in reports), "pulled")
        self.fresh.observe("read", max(report.read_s for report in reports))
        self.fresh.observe("load", max(report.total_s for report in reports))

    def written(self, reports: Sequence[SaveReport]) -> None:
        """A save has ended on all ranks."""
        self.fresh.add("bytes", sum(report.moved_bytes for report in reports), "saved")
        self.fresh.observe("save", max(report.total_s for report in reports))

    def committed(self, tokens: int) -> None:
        """An object of so many tokens has become visible."""
        self.committed_objects += 1
        self.fresh.add("saved_tokens", tokens)

    def drop(self, cause: str, tokens: Sequence[int], request: str) -> None:
        """Objects of so many tokens are not saved, which is normal: the first of a kind is said, the rest counted."""
        if cause not in self.dropped:
            log.info("request %s: not saved: %s (later ones are only counted)", request, cause)
        self.dropped[cause] += len(tokens)
        self.fresh.add("dropped_tokens", sum(tokens), _label(cause))

    def say_once(self, kind: str, line: str) -> None:
        """One line in the engine's log, the first time."""
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s", line)
