"""How long steps of the engine take, seen from its scheduler: the way to its prefill rate.

A step begins when it is scheduled, or when the one before it has ended, if the engine schedules ahead; it ends when
the scheduler takes its output. Steps end in the order in which they began.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

STEPS_MAX = 64  # under way; more means that some have ended unseen
PURE_SHARE = 0.9


class _Step(NamedTuple):
    began: float
    tokens: int
    prefill_tokens: int


class Prefilled(NamedTuple):
    """What a step has computed, if it did little but prefill."""

    tokens: int
    seconds: float


class Steps:
    """The steps under way."""

    def __init__(self) -> None:
        self._under_way: deque[_Step] = deque()
        self._last_end = 0.0
        self._seen = 0

    def begin(self, now: float, scheduled: Mapping[str, int], drafts: Mapping[str, Any]) -> None:
        """A step is scheduled: tokens by request; the requests in `drafts` decode several at once."""
        prefill = sum(count for name, count in scheduled.items() if count > 1 and name not in drafts)
        if len(self._under_way) >= STEPS_MAX:
            self._under_way.clear()
        self._under_way.append(_Step(now, sum(scheduled.values()), prefill))

    def end(self, now: float) -> Prefilled | None:
        """The oldest step has ended. The first with prefill is not told: it warms the engine up."""
        if not self._under_way:
            return None
        step = self._under_way.popleft()
        seconds = now - max(step.began, self._last_end)
        self._last_end = now
        if not step.prefill_tokens or step.prefill_tokens < PURE_SHARE * step.tokens:
            return None
        self._seen += 1
        return Prefilled(step.prefill_tokens, seconds) if self._seen > 1 else None
