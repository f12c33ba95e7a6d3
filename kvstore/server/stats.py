"""What the control endpoint counts, and the frozen picture of it that others may keep."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counts since the start of this boot.

    `requests` and `busy_s` are per call ("Acquire", ...), `failures` per code of `Failed`. `garbage_frames`
    were dropped without an answer because nobody could be answered; `lost_replies` had no taker.
    """

    requests: dict[str, int]
    busy_s: dict[str, float]
    failures: dict[str, int]
    garbage_frames: int
    lost_replies: int
    parked: int
    parked_total: int
    not_parked: int


@dataclass(slots=True)
class Counters:
    """The running counts of one server."""

    requests: Counter[str] = field(default_factory=Counter)
    busy_s: dict[str, float] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    garbage_frames: int = 0
    lost_replies: int = 0

    def request(self, call: str, seconds: float) -> None:
        """One request was dispatched and took this long on the loop (parked time is not counted)."""
        self.requests[call] += 1
        self.busy_s[call] = self.busy_s.get(call, 0.0) + seconds

    def freeze(self, parked: int, parked_total: int, not_parked: int) -> ServerStats:
        """The counts now."""
        return ServerStats(
            requests=dict(self.requests),
            busy_s=dict(self.busy_s),
            failures=dict(self.failures),
            garbage_frames=self.garbage_frames,
            lost_replies=self.lost_replies,
            parked=parked,
            parked_total=parked_total,
            not_parked=not_parked,
        )
