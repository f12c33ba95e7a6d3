"""What the scheduler half counts. Tokens are of prompts, beyond what the local prefix cache had."""

from collections import Counter
from dataclasses import dataclass, field

from connector.compat import logger
from connector.control import ReportLine
from kvstore.core import MissReason, limits

log = logger(__name__)


@dataclass(slots=True)
class Stats:
    """Counters since the engine's start. `dropped` counts objects that were not saved, by cause."""

    queried_tokens: int = 0
    promised_tokens: int = 0
    pulled_tokens: int = 0
    loads: int = 0
    loads_failed: int = 0
    offered_objects: int = 0
    committed_objects: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    _lines: list[ReportLine] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def count(self, line: ReportLine) -> None:
        """One request's outcome."""
        self.queried_tokens += line.queried_tokens
        self.promised_tokens += line.promised_tokens
        self.pulled_tokens += line.pulled_tokens
        if line.reason is not None:
            self.misses[line.reason] += 1
        if len(self._lines) < limits.REPORTS_PER_CALL_MAX:
            self._lines.append(line)

    def take_lines(self) -> list[ReportLine]:
        """The outcomes since the last call, for the node; at most what one report may hold."""
        lines, self._lines = self._lines, []
        return lines

    def drop(self, cause: str, objects: int = 1) -> None:
        """Objects that are not saved, which is normal: the first of a kind is said, the rest counted."""
        if cause not in self.dropped:
            log.info("not saved: %s (later ones are only counted)", cause)
        self.dropped[cause] += objects

    def say_once(self, kind: str, line: str) -> None:
        """One line in the engine's log, the first time."""
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s", line)
