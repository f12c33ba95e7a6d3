"""The scheduler's question "how many tokens can you bring?", from a request's arrival to its promise.

    arrival    lookup, in the background, without a lease (a handed-off request needs none)
    ask        lookup answered -> acquire, in the background; meanwhile "ask again", for a short while
               acquire answered -> (tokens beyond the local prefix cache, True): from now on a promise
    allocated  the promise goes into a load, or back

The answer is idempotent: the same promise, or the same "nothing", until blocks are allocated. A promise that
runs out in a long queue, or no longer fits behind a local hit that has changed, is replaced.
Keys asked for begin with the link in which the local hit ends.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from connector.control import Promise
from connector.cost import Offer
from connector.keys import Link
from connector.leases import LEASE_S
from connector.requests import Ask, RequestState
from connector.shared import Shared
from kvstore.core import MissReason

Answer = tuple[int | None, bool]
AGAIN: Answer = (None, False)
NOTHING: Answer = (0, False)

ACQUIRES_MAX = 4  # per admission
LEASE_MIN_S = 5.0  # a promise that ends sooner is not worth starting a load with


class Asks:
    """Answers for all waiting requests."""

    def __init__(self, shared: Shared) -> None:
        self._control = shared.control
        self._config = shared.config
        self._leases = shared.leases
        self._known = shared.known
        self._paths = shared.paths
        self._cost = shared.cost
        self._stats = shared.stats
        self._clock = shared.clock

    def look_up(self, state: RequestState) -> None:
        """At arrival: what may be stored of this request's prompt."""
        if state.links and state.handoff is None and state.ask.lookup is None:
            keys = [link.key for link in state.links]
            state.ask.lookup = self._control.lookup(keys, prefetch=self._config.load_policy != "never")

    def match(self, state: RequestState, computed: int) -> Answer:
        """Tokens that a load can bring beyond the `computed` local ones. Never waits."""
        ask = state.ask
        ask.computed = computed
        for _ in range(2):
            if ask.lease is None and not ask.refused:
                self._advance(state, computed)
            if ask.lease is None or self._holds(state, computed):
                break
            self._leases.release(ask.lease)  # run out, or asked for behind another local hit
            ask.lease = None
        if ask.lease is not None:
            return self._promised_stop(state) - computed, True
        return NOTHING if ask.refused else AGAIN

    def refuse(self, state: RequestState, reason: MissReason | None) -> Answer:
        """The answer "nothing", until blocks are allocated; None: there is nothing left to bring."""
        state.ask.refused = True
        state.ask.reason = reason
        return NOTHING

    def wait(self, state: RequestState, limit_s: float, reason: MissReason) -> Answer:
        """Holds the request back, for `limit_s` from its question on; then the answer is "nothing", for `reason`.

        Never in the pass that asked: however long a step of the engine takes, the next one looks for the answer.
        """
        now = self._clock()
        if state.ask.wait_until_s is None:
            state.ask.wait_until_s = now + limit_s
            return AGAIN
        return AGAIN if now < state.ask.wait_until_s else self.refuse(state, reason)

    def close(self, ask: Ask) -> None:
        """Nobody wants this answer any more: gives back what is, or may still be, promised."""
        if ask.acquire is not None:
            self._control.abandon(ask.acquire)
            ask.acquire = None
        if ask.lease is not None:
            self._leases.release(ask.lease)
            ask.lease = None

    def _advance(self, state: RequestState, computed: int) -> None:
        """One step from the question to its answer."""
        ask = state.ask
        if ask.acquire is None:
            wanted = self._wanted(state, computed)
            if wanted is None or not self._worth(state, wanted, computed):
                return
            if ask.acquires == ACQUIRES_MAX:
                self.refuse(state, MissReason.LEASE_LIMIT)
                return
            self._acquire(state, self._beyond(wanted, computed))
        assert ask.acquire is not None
        if ask.acquire.done():
            self._acquired(state, computed)
        elif self.wait(state, *self._patience(state)) == NOTHING:
            self._control.abandon(ask.acquire)
            ask.acquire = None

    def _patience(self, state: RequestState) -> tuple[float, MissReason]:
        if self._waits_for_commits(state):
            return self._config.handoff_wait_s + self._config.lookup_timeout_s, MissReason.PENDING_TIMEOUT
        return self._config.lookup_timeout_s, MissReason.NODE_DOWN

    def _waits_for_commits(self, state: RequestState) -> bool:
        """Once per admission: what has come by then, or has not, is not waited for again."""
        return state.handoff is not None and state.ask.acquires == 1

    def _wanted(self, state: RequestState, computed: int) -> Sequence[Link] | None:
        """The links that are worth asking for, as far as is known; None: not known yet, or answered."""
        links = state.links or ()
        if state.handoff is not None:
            tokens = state.handoff.tokens
            return [x for x in links if x.stop <= tokens and (not x.tail or x.stop == tokens)]
        lookup = state.ask.lookup
        if lookup is None:
            return links
        if not lookup.done():
            self.wait(state, self._config.lookup_timeout_s, MissReason.INDEX_DOWN)
            return None
        if lookup.exception() is not None:
            self.refuse(state, MissReason.INDEX_DOWN)
            return None
        found = lookup.result()
        if found.num_keys == len(links) or found.reason is MissReason.INDEX_DOWN:
            return links
        self._known.forget(link.key for link in links[found.num_keys :])
        state.ask.reason = state.foreign or found.reason or MissReason.NEVER_STORED
        gain = links[: found.num_keys]
        return links if gain and gain[-1].stop > computed else gain  # a node may know better than the index

    def _beyond(self, wanted: Sequence[Link], computed: int) -> Sequence[Link]:
        """What of these links, the first of the prompt, a load must bring."""
        return wanted[bisect_right(wanted, computed, key=lambda link: link.stop) :]

    def _worth(self, state: RequestState, links: Sequence[Link], computed: int) -> bool:
        """Whether these links bring enough beyond the local hit; if not, that is the answer."""
        least = 1 if state.handoff is not None else max(1, self._config.min_tokens)
        gain = max(link.stop for link in links) - computed if links else 0
        if gain >= least:
            return True
        all_of_it = state.links[-1].stop - computed if state.links else 0
        if gain > 0 or 0 < all_of_it < least:
            self.refuse(state, MissReason.TOO_SHORT)
        else:
            self.refuse(state, state.ask.reason if all_of_it > 0 else None)
        return False

    def _acquire(self, state: RequestState, wanted: Sequence[Link]) -> None:
        ask, handoff = state.ask, state.handoff
        ask.acquires += 1
        ask.wanted = tuple(wanted)
        ask.asked_s = self._clock()
        ask.wait_until_s = None  # a question of its own, with a deadline of its own
        ask.acquire = self._control.acquire(
            [link.key for link in wanted],
            LEASE_S,
            self._config.handoff_wait_s if self._waits_for_commits(state) else 0.0,
            handoff.nodes if handoff else (),
        )

    def _acquired(self, state: RequestState, computed: int) -> None:
        ask = state.ask
        assert ask.acquire is not None
        future, ask.acquire = ask.acquire, None
        if future.exception() is not None:
            self.refuse(state, MissReason.NODE_DOWN)
            return
        promise = future.result()
        self._learn(state, promise)
        promise = self._within_reach(promise)
        if not self._suffices(ask, promise):
            return
        promise = self._sooner(state, promise, computed)
        ask.lease = self._leases.take(promise, ask.asked_s)
        ask.reason = promise.reason or ask.reason
        if not self._worth(state, self._promised(state), computed):
            self._leases.release(ask.lease)
            ask.lease = None

    def _suffices(self, ask: Ask, promise: Promise) -> bool:
        """Whether what is promised is of use; if not, it is given back here."""
        return True

    def _sooner(self, state: RequestState, promise: Promise, computed: int) -> Promise:
        """What of a promise is loaded sooner than it is computed; or what is loaded to measure."""
        offers = [
            Offer(link.stop - max(link.start, computed), one.size_bytes, one.node.node, one.tier, one.eta_s)
            for link, one in zip(state.ask.wanted, promise.objects, strict=False)
        ]
        if not offers:
            return promise
        verdict = self._cost.decide(offers)
        self._stats.fresh.add("load_decisions", 1, verdict.decision)
        surplus = promise.objects[verdict.num_objects :]
        if not surplus:
            return promise
        kept = self._control.shorten(promise, [one.key for one in surplus])
        return replace(kept, reason=MissReason.TOO_SLOW)

    def _within_reach(self, promise: Promise) -> Promise:
        """What of a promise lies before the first object at a node that moves no bytes."""
        nodes = {promised.node.node: promised.node for promised in promise.objects}
        broken = {node for node, address in nodes.items() if not self._paths.allows(address)}
        if not broken:
            return promise
        reach = next(at for at, promised in enumerate(promise.objects) if promised.node.node in broken)
        if reach == 0:
            self._control.release(promise)
        return replace(promise, objects=promise.objects[:reach], reason=MissReason.BREAKER_OPEN)

    def _learn(self, state: RequestState, promise: Promise) -> None:
        """A promised key is stored; the first that was not promised, and what follows it, is pushed again."""
        asked = state.ask.wanted
        for link, promised in zip(asked, promise.objects, strict=False):
            assert link.key == promised.key, "a promise is in the order of its keys"
            self._known.add(link.key, promised.node.node.hex())
        self._known.forget(link.key for link in asked[len(promise.objects) :])

    def _promised(self, state: RequestState) -> Sequence[Link]:
        assert state.ask.lease is not None
        return state.ask.wanted[: len(state.ask.lease.promise.objects)]

    def _promised_stop(self, state: RequestState) -> int:
        return max(link.stop for link in self._promised(state))

    def _holds(self, state: RequestState, computed: int) -> bool:
        """Whether the promise still is one, and still fits behind the local hit."""
        assert state.ask.lease is not None
        if self._leases.remaining_s(state.ask.lease) < LEASE_MIN_S:
            return False
        return self._promised(state)[0].start <= computed < self._promised_stop(state)
