"""The scheduler's question where a hit is of use as a whole or not at all.

Of a hit in part nothing is promised; what one object lacks is remembered with the question, and the next try is for
something else (`connector.hybrid_asks`) or nothing.

MLA on CPU without AMX is such a case: vLLM's prefill there sees nothing of what lies before it (it turns its own
prefix cache off for that), while a single token is decoded, which sees everything. So a hit must leave exactly one
token to compute, and a load that fails in part leaves nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

from connector.asks import Asks
from connector.control import Promise
from connector.cost import Decision, Offer
from connector.keys import Link
from connector.requests import Ask, RequestState
from kvstore.core import MissReason


class WholeAsks(Asks):
    """Answers for all waiting requests: all that is asked for, or nothing."""

    def _suffices(self, ask: Ask, promise: Promise) -> bool:
        if len(promise.objects) == len(ask.wanted):
            return True
        ask.absent.add(ask.wanted[len(promise.objects)].key)
        ask.reason = promise.reason or ask.reason
        if promise.objects:
            self._control.release(promise)
        return False

    def _sooner(self, state: RequestState, promise: Promise, computed: int) -> Promise:
        """All of it or nothing, whichever is sooner: what is left out of a hit makes the rest useless."""
        *others, last = promise.objects
        tokens = max(link.stop for link in state.ask.wanted) - computed
        offers = [Offer(0, one.size_bytes, one.node.node, one.tier, one.eta_s) for one in others]
        offers.append(Offer(tokens, last.size_bytes, last.node.node, last.tier, last.eta_s))
        verdict = self._cost.decide(offers)
        self._stats.fresh.add("load_decisions", 1, verdict.decision)
        if verdict.num_objects == len(offers) or (verdict.decision is Decision.PROBE and verdict.num_objects):
            return promise
        self._control.release(promise)
        return replace(promise, objects=(), reason=MissReason.TOO_SLOW)


class LastTokenAsks(WholeAsks):
    """Promises what leaves one token to compute, and nothing else."""

    def look_up(self, state: RequestState) -> None:
        """At arrival: what may be stored, if it can be of use."""
        if _leaves_one(state, state.links or ()):
            super().look_up(state)

    def _wanted(self, state: RequestState, computed: int) -> Sequence[Link] | None:
        if state.links and not _leaves_one(state, state.links):
            self.refuse(state, MissReason.LAYOUT_UNSUPPORTED)
            return None
        wanted = () if state.ask.absent else super()._wanted(state, computed)
        if wanted is None or _leaves_one(state, wanted):
            return wanted
        state.ask.reason = state.ask.reason or MissReason.NEVER_STORED
        return ()


def _leaves_one(state: RequestState, links: Sequence[Link]) -> bool:
    """Whether behind these links vLLM computes one token: the last one, which it computes even if all are hit."""
    return bool(links) and links[-1].stop >= state.request.num_tokens - 1
