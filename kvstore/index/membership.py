"""Which nodes are alive, as a client sees it.

Readers ignore the entries of nodes that are not in this list, so a list that is empty by mistake costs
every hit. When all heartbeats vanish at once, Redis was flushed or replaced far more likely than all
nodes died: the last list is kept for `LAST_NODES_KEPT_S`, until the nodes have announced themselves
again. While the index is down nothing is learnt and the last list stays.
"""

import time
from collections.abc import Callable

from kvstore.core.limits import LAST_NODES_KEPT_S
from kvstore.index.base import Index, NodeRecord
from kvstore.wire import NodeId


class Membership:
    """The last list of nodes that is worth believing.

    Args:
        index: where heartbeats are.
        clock: seconds, monotonic.
        kept_s: how long the last list is kept when all heartbeats have vanished.
    """

    def __init__(
        self, index: Index, clock: Callable[[], float] = time.monotonic, kept_s: float = LAST_NODES_KEPT_S
    ) -> None:
        self._index = index
        self._clock = clock
        self._kept_s = kept_s
        self._alive: dict[NodeId, NodeRecord] = {}
        self._vanished_at: float | None = None

    async def refresh(self) -> None:
        """Asks the index.

        Raises:
            IndexDown: it does not answer; `alive()` stays as it was.
        """
        records = await self._index.nodes()
        if records:
            self._alive = {record.node: record for record in records}
            self._vanished_at = None
        elif self._vanished_at is None:
            self._vanished_at = self._clock()

    def alive(self) -> dict[NodeId, NodeRecord]:
        """The nodes to believe, by id; empty before the first `refresh`."""
        if self._vanished_at is not None and self._clock() - self._vanished_at >= self._kept_s:
            self._alive = {}
        return dict(self._alive)

    def __repr__(self) -> str:
        return f"<Membership {len(self._alive)} nodes{', all vanished' if self._vanished_at else ''}>"
