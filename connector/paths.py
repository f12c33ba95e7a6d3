"""Which nodes bytes reach: a memory of transfers that failed.

A node that answers on its control endpoint but moves no bytes (a firewall, a broken NIC, another network) would
cost every request a whole time-out. So after several failed jobs in a row nothing is loaded from it or saved to it,
but for one trial per interval, which doubles until a trial succeeds. A trial that comes to nothing (its request was
aborted, its promise was too short) is one that failed.
"""

import random
from collections.abc import Callable

from kvstore.client import Breaker, NodeAddress, NodeId
from kvstore.core import MissReason

FAILURES_MAX = 3
TRIAL_S = 5.0
TRIAL_S_MAX = 120.0

_OF_THE_PATH = frozenset({MissReason.NODE_DOWN, MissReason.TOO_SLOW})


class Paths:
    """The nodes with which transfers have failed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rng = random.Random()  # spreads the trials of many engines
        self._troubled: dict[NodeId, Breaker] = {}

    def allows(self, node: NodeAddress) -> bool:
        """Whether something may be moved to or from this node now. If a trial is due, the asker is it."""
        breaker = self._troubled.get(node.node)
        if breaker is None or breaker.closed:
            return True
        if not breaker.begin_probe():
            return False
        breaker.failure()  # until it succeeds
        return True

    def moved(self, node: NodeAddress) -> None:
        """Bytes have reached the other end."""
        self._troubled.pop(node.node, None)

    def failed(self, node: NodeAddress, reason: MissReason | None) -> None:
        """A job with this node has failed; counted if that may be the path's fault."""
        if reason not in _OF_THE_PATH:
            return
        breaker = self._troubled.get(node.node)
        if breaker is None:
            breaker = self._troubled[node.node] = Breaker(
                self._clock, self._rng, failures_max=FAILURES_MAX, probe_s=TRIAL_S, probe_s_max=TRIAL_S_MAX
            )
        breaker.failure()
