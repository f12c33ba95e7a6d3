"""What engines report of their requests: tokens, counted once per request, and remembered for a while."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.core import BadRequest, MissReason, limits
from kvstore.store.recent import Recent
from kvstore.store.snapshot import Totals
from kvstore.wire import ClientId, Report, ReportItem

_Entry = tuple[tuple[ClientId, str], tuple[float, ReportItem]]


class ReportView(NamedTuple):
    """What one engine (`client`, in hex) has reported of one request, `age_s` ago; all numbers in tokens.

    `from_nvme` of the pulled ones had been on NVMe alone.
    """

    request: str
    client: str
    age_s: float
    queried: int
    promised: int
    pulled: int
    missed: int
    reason: MissReason | None
    from_nvme: int = 0


class ReportLog(NamedTuple):
    """What was remembered at one moment; to be looked through by another thread than the store's."""

    now_s: float
    entries: Sequence[_Entry]

    def of(self, request: str) -> list[ReportView]:
        """The reports of a request: of exactly this id, or one that an engine has made of it by adding "-...",
        as vLLM does for each prompt and each of several answers."""
        return [
            self._view(client, at_s, item)
            for (client, name), (at_s, item) in self.entries
            if name == request or name.startswith(f"{request}-")
        ]

    def _view(self, client: ClientId, at_s: float, item: ReportItem) -> ReportView:
        missed = item.queried_tokens - item.pulled_tokens
        tokens = item.queried_tokens, item.promised_tokens, item.pulled_tokens, missed
        reason = item.reason or (MissReason.TOO_SHORT if missed else None)
        return ReportView(
            item.request, client.hex(), round(self.now_s - at_s, 3), *tokens, reason, item.nvme_tokens
        )


class Reports:
    """Of the last `limits.REPORTS_REMEMBERED_MAX` requests.

    Args:
        totals: what is counted up.
        clock: seconds, never going back.
    """

    def __init__(self, totals: Totals, clock: Callable[[], float]) -> None:
        self._totals = totals
        self._clock = clock
        self._known: Recent[tuple[ClientId, str], tuple[float, ReportItem]] = Recent(
            limits.REPORTS_REMEMBERED_MAX
        )

    def take(self, client: ClientId, report: Report) -> None:
        """Counts tokens, once for each engine request. Every token that was queried is a hit or a miss.

        Missed tokens without a reason are `too_short`: all that could be stored was pulled, and the rest of the
        prompt is less than an engine block.

        Raises:
            BadRequest: numbers that cannot be.
        """
        for item in report.items:
            in_order = 0 <= item.nvme_tokens <= item.pulled_tokens <= item.queried_tokens
            if not in_order or item.promised_tokens < 0:
                raise BadRequest(
                    f"request {item.request!r} reports {item.pulled_tokens} tokens pulled of {item.queried_tokens}"
                )
            if (client, item.request) not in self._known:
                self._known.set((client, item.request), (self._clock(), item))
                self._count(item)

    def _count(self, item: ReportItem) -> None:
        totals = self._totals
        totals.reports += 1
        totals.queried_tokens += item.queried_tokens
        totals.promised_tokens += item.promised_tokens
        totals.hit_tokens += item.pulled_tokens
        missed_tokens = item.queried_tokens - item.pulled_tokens
        reason = item.reason or MissReason.TOO_SHORT
        if missed_tokens:
            totals.missed_tokens[reason] = totals.missed_tokens.get(reason, 0) + missed_tokens

    def log(self) -> "ReportLog":
        """Those that are remembered, the oldest first."""
        return ReportLog(self._clock(), self._known.items())
