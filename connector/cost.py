"""Load or compute: whichever has been measured to be sooner. Pure: no clock, no I/O.

    load_s(k)     of a promise's first k objects: over the nodes the slowest of
                  bytes from DRAM * s/byte + bytes from NVMe * s/byte, and not before the node's own word for NVMe
    compute_s(k)  tokens * s/token
    k             where compute_s - load_s is largest: all, none, or what lies in the faster tier

Rates are measured where they are meant: pulls per node and tier, from the worker's beginning to the last byte in
its block (the first pull from a node, which opens connections, is not counted); computing from steps that do little
but prefill. A rate follows what is faster quickly, since a link cannot be faster than it is, and what is slower in
bounded steps, since a hiccup is not a slow link. What has not been measured, or not often enough to tell a slow link
from a hiccup, is taken for fast: it is tried.

So that a link that has recovered is noticed, every `PROBE_EVERY`th request for which something was too slow loads a
little of it all the same. So that an engine that finds everything stored learns what computing costs, one short
request is computed when there have been loads enough to compare with.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvstore.client import NodeId
from kvstore.core import Tier

PROBE_EVERY = 100
PROBE_OBJECTS = 2
TRIAL_AFTER_LOADS = 8
TRIAL_TOKENS_MAX = 2_048
STEP_TOKENS_MIN = 256  # a step with fewer says more about its fixed costs than about the rate
SLOWER_MAX = 4.0  # the factor by which one sample can be slower than all before it, as far as it counts
FASTER_MAX = 100.0
PULLS_MIN = 3  # samples of a place, until what it says is believed
FASTER_WEIGHT = 0.7
SLOWER_WEIGHT = 0.5


class LoadPolicy(StrEnum):
    """Who decides between loading and computing: the measured cost, or the user."""

    COST = "cost"
    ALWAYS = "always"
    NEVER = "never"


class Offer(NamedTuple):
    """One object of a promise: the tokens it would bring, and where its bytes are."""

    tokens: int
    size_bytes: int
    node: NodeId
    tier: Tier
    eta_s: float = 0.0


class Decision(StrEnum):
    """What was decided on a promise: all, some or nothing of it is loaded; or this much is loaded to measure."""

    LOAD = "load"
    CUT = "cut"
    COMPUTE = "compute"
    PROBE = "probe"


class Verdict(NamedTuple):
    """Load the first `num_objects`."""

    num_objects: int
    decision: Decision


class Place(NamedTuple):
    """Where bytes come from."""

    node: NodeId
    tier: Tier


@dataclass(slots=True)
class Rate:
    """Seconds per unit, as measured; None before the first sample that counts."""

    value: float | None = None
    samples: int = 0

    def add(self, units: float, seconds: float) -> None:
        """One sample."""
        if units <= 0 or seconds <= 0:
            return  # a clock that stands still
        sample = seconds / units
        self.samples += 1
        if self.value is None:
            self.value = sample
            return
        change = math.log(max(1 / FASTER_MAX, min(sample / self.value, SLOWER_MAX)))
        self.value *= math.exp(change * (FASTER_WEIGHT if change < 0 else SLOWER_WEIGHT))


@dataclass(frozen=True, slots=True)
class CostNumbers:
    """What was measured and decided so far, as plain numbers for metrics; rates only once they were measured.

    `pull_bytes_per_s` is by (node id in hex, tier).
    """

    prefill_tokens_per_s: float | None
    pull_bytes_per_s: Mapping[tuple[str, str], float]
    decisions: Mapping[Decision, int]


@dataclass(slots=True)
class Cost:
    """The rates of one engine, and its decisions.

    Args:
        policy: who decides.
    """

    policy: LoadPolicy = LoadPolicy.COST
    decisions: Counter[Decision] = field(default_factory=Counter)
    _prefill: Rate = field(default_factory=Rate)
    _pulls: dict[Place, Rate] = field(default_factory=dict)
    _greeted: set[NodeId] = field(default_factory=set)
    _since_probe: int = 0
    _since_trial: int = PROBE_EVERY

    # --- measuring ------------------------------------------------------------------------------------

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts, and next to nothing else."""
        if tokens >= STEP_TOKENS_MIN:
            self._prefill.add(tokens, seconds)

    def pulled(self, place: Place, size_bytes: int, seconds: float) -> None:
        """A load has brought so many bytes from there. The first from a node is not counted: it is slow to start."""
        if place.node not in self._greeted:
            self._greeted.add(place.node)
        else:
            self._pulls.setdefault(place, Rate()).add(size_bytes, seconds)

    @property
    def numbers(self) -> CostNumbers:
        """A frozen picture."""
        prefill = self._prefill.value
        pulls = {place: rate.value for place, rate in self._pulls.items()}
        return CostNumbers(
            1 / prefill if prefill else None,
            {(place.node.hex(), place.tier.value): 1 / value for place, value in pulls.items() if value},
            dict(self.decisions),
        )

    # --- deciding -------------------------------------------------------------------------------------

    def decide(self, offers: Sequence[Offer]) -> Verdict:
        """How much of a promise to load. To be asked once for each promise."""
        verdict = self._verdict(offers)
        self.decisions[verdict.decision] += 1
        return verdict

    def _verdict(self, offers: Sequence[Offer]) -> Verdict:
        if self.policy is LoadPolicy.ALWAYS:
            return Verdict(len(offers), Decision.LOAD)
        if self.policy is LoadPolicy.NEVER:
            return Verdict(0, Decision.COMPUTE)
        if self._is_trial(offers):
            return Verdict(0, Decision.PROBE)
        best = self._best(offers)
        if best == len(offers):
            return Verdict(best, Decision.LOAD)
        self._since_probe += 1
        if self._since_probe == PROBE_EVERY:
            self._since_probe = 0
            return Verdict(min(best + PROBE_OBJECTS, len(offers)), Decision.PROBE)
        return Verdict(best, Decision.CUT if best else Decision.COMPUTE)

    def _is_trial(self, offers: Sequence[Offer]) -> bool:
        """Whether this request is computed to learn what computing costs."""
        if self._prefill.value is not None:
            return False
        loads = sum(rate.samples for rate in self._pulls.values())
        tokens = sum(offer.tokens for offer in offers)
        if loads < TRIAL_AFTER_LOADS or not STEP_TOKENS_MIN <= tokens <= TRIAL_TOKENS_MAX:
            return False
        self._since_trial += 1
        if self._since_trial <= PROBE_EVERY:
            return False
        self._since_trial = 0
        return True

    def _best(self, offers: Sequence[Offer]) -> int:
        """The number of objects with which most time is gained."""
        if self._prefill.value is None:
            return len(offers)
        tokens, best, best_gain_s = 0, 0, 0.0
        times: dict[NodeId, _Time] = {}
        load_s = 0.0
        for number, offer in enumerate(offers, 1):
            tokens += offer.tokens
            time = times.setdefault(offer.node, _Time())
            rate = self._pulls.get(Place(offer.node, offer.tier))
            if rate is not None and rate.samples >= PULLS_MIN:
                time.moving_s += offer.size_bytes * (rate.value or 0.0)
            time.coming_s = max(time.coming_s, offer.eta_s)
            load_s = max(load_s, time.moving_s, time.coming_s)
            gain_s = tokens * self._prefill.value - load_s
            if gain_s >= best_gain_s:
                best, best_gain_s = number, gain_s
        return best


@dataclass(slots=True)
class _Time:
    """What one node needs: to move the bytes, and until the last of them is in DRAM."""

    moving_s: float = 0.0
    coming_s: float = 0.0
