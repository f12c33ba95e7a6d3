"""The scheduler's question where the model has several kinds of KV: hits end at boundaries (`connector.boundaries`).

    arrival    one query, which of all keys of the prompt are there: of its links, and of their pieces
    ask        the largest boundary that is complete -> acquire of the chain up to it, and of the pieces that it needs
               all promised -> a promise. Not all -> what is missing is not there, and the next boundary is asked for
    allocated  the promise goes into a load, or back

Where nobody can tell what is there (no index, or a hand-off, whose keys may be on their way) the boundaries are asked
for at which engines save.
"""

from collections.abc import Sequence

from connector.boundaries import longest_hit, needed, worth_saving
from connector.keys import Link
from connector.requests import RequestState
from connector.shared import Shared
from connector.whole_asks import WholeAsks
from kvstore.core import Key, MissReason


class HybridAsks(WholeAsks):
    """Answers for all waiting requests."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._kinds = shared.kinds

    def look_up(self, state: RequestState) -> None:
        """At arrival: what may be stored of this request's prompt."""
        if state.links and state.handoff is None and state.ask.presence is None:
            state.ask.presence = self._control.present(_keys(state.links))

    def _wanted(self, state: RequestState, computed: int) -> Sequence[Link] | None:
        ask, links = state.ask, state.links or ()
        if state.handoff is not None:
            links = tuple(link for link in links if link.stop <= state.handoff.tokens)
        held: frozenset[Key] | None = None
        if ask.presence is not None:
            if not ask.presence.done():
                self.wait(state, self._config.lookup_timeout_s, MissReason.INDEX_DOWN)
                return None
            if ask.presence.exception() is not None:
                self.refuse(state, MissReason.INDEX_DOWN)
                return None
            if (present := ask.presence.result()) is not None:
                keys = _keys(links)
                held = frozenset(key for key, there in zip(keys, present, strict=True) if there)
                self._known.forget(key for key in keys if key not in held)
        if held is None:
            pieces = worth_saving(links, self._kinds, self._config.retention_tokens, states=True)
            held = pieces | {link.key for link in links}
        ask.reason = state.foreign or ask.reason or MissReason.NEVER_STORED
        held -= ask.absent
        return links[: longest_hit(links, self._kinds, held.__contains__, computed)]

    def _beyond(self, wanted: Sequence[Link], computed: int) -> Sequence[Link]:
        pieces = needed(wanted, len(wanted) - 1, self._kinds, computed)
        return [*super()._beyond(wanted, computed), *pieces]


def _keys(links: Sequence[Link]) -> list[Key]:
    """Of all links, then of all their pieces."""
    return [*(link.key for link in links), *(piece.key for link in links for piece in link.pieces)]
