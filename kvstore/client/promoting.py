"""Promotion: leased copies come from NVMe into DRAM, in the order of their chain.

    promise       DRAM DRAM disk disk disk disk disk
    Pages      ->           here here disk disk disk    what is here is told at once, the rest is on its way
    Pages, wait ->                    here              the first of the rest
    release       0    1    2    3    4                 by the caller, when it has read them: room for the next
    Pages      ->                          here disk

So a chain larger than the node's DRAM streams through it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvstore.client.address import NodeAddress
from kvstore.client.breaker import BreakerOpen
from kvstore.client.control import REFUSALS, TROUBLE
from kvstore.client.peers import Peers
from kvstore.client.plan import batches
from kvstore.client.promise import Copy, Promise
from kvstore.client.reading import reason_of
from kvstore.core import MissReason, Namespace
from kvstore.wire import Acquired, LeaseId, Miss, OnDisk, Pages, Resident

WAIT_S = 1.0  # how long one question is parked: a node that forgets it costs no more
PAUSE_S = 0.02  # between questions to a node that answers at once although nothing has changed
ATTEMPTS = 2  # a question that is not answered is asked once more


class Arrival(NamedTuple):
    """The copy at `position` of a promise is in DRAM now; or, without a copy, the chain ends there, for `reason`."""

    position: int
    copy: Copy | None = None
    reason: MissReason | None = None


Arrived = Callable[[Arrival], None]


class Promotion:
    """One promise's way into DRAM.

    Args:
        peers: the nodes.
        clock: seconds.
        item_bytes: see `plan.item_bytes`, by namespace.
        promise: what is promised, in DRAM or on NVMe.
        timeout_s: how long it may take.
        arrived: is told of every copy that was on NVMe: once, or of the end of the chain before it.
        sealed: seals will do in place of tables.
    """

    def __init__(
        self,
        peers: Peers,
        clock: Callable[[], float],
        item_bytes: Mapping[Namespace, int],
        promise: Promise,
        timeout_s: float,
        arrived: Arrived,
        *,
        sealed: bool,
    ) -> None:
        self._sealed = sealed
        self._peers = peers
        self._clock = clock
        self._batch_bytes = item_bytes[promise.namespace]
        self._promise = promise
        self._until = clock() + timeout_s
        self._arrived = arrived
        self._end = len(promise.copies)  # the chain ends before this index

    async def run(self) -> None:
        """Asks until every copy has arrived, the chain has ended, or the time is over. Cancelling it is safe."""
        groups: dict[LeaseId, tuple[NodeAddress, list[int]]] = {}
        for index, copy in enumerate(self._promise.copies):
            if isinstance(copy.answer, OnDisk):
                groups.setdefault(copy.lease, (copy.address, []))[1].append(index)
        await asyncio.gather(*(self._of_lease(lease, *group) for lease, group in groups.items()))

    async def _of_lease(self, lease: LeaseId, address: NodeAddress, waiting: list[int]) -> None:
        """Asks one node for the copies at these indices: in turn where all of them are, which sets them on their way,
        and for the first alone, until it has come."""
        looks = False
        while waiting := [index for index in waiting if index < self._end]:
            looks = not looks
            left_s = self._until - self._clock()
            if left_s <= 0:
                self._lose(waiting[0], MissReason.PROMOTE_DEADLINE)
                return
            asked = batches(waiting, self._batch_bytes)[0] if looks else waiting[:1]
            early = self._clock() + PAUSE_S
            answers = await self._ask(lease, address, asked, 0.0 if looks else min(WAIT_S, left_s))
            if answers is None:
                return
            here = self._settled(asked, answers)
            waiting = [index for index in waiting if index not in here]
            if not looks and not here and (early_s := early - self._clock()) > 0:
                await asyncio.sleep(min(early_s, left_s))

    async def _ask(
        self, lease: LeaseId, address: NodeAddress, asked: Sequence[int], wait_s: float
    ) -> tuple[object, ...] | None:
        """The node's answers; None if there are none to be had: then the chain ends here."""
        peer = self._peers.reach(address) or self._peers.at(address.control)
        keys = tuple(self._promise.copies[index].key for index in asked)
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                body = (await peer.ask(Pages(lease, keys, wait_s, self._sealed), wait_s=wait_s)).body
            except TROUBLE as error:
                if attempts_left and not isinstance(error, (BreakerOpen, *REFUSALS)):
                    continue
                self._lose(asked[0], reason_of(error))
                return None
            return body.answers if isinstance(body, Acquired) else ()
        raise AssertionError("the last attempt returns")

    def _settled(self, asked: Sequence[int], answers: Iterable[object]) -> set[int]:
        """Tells of what has arrived, and where the chain ends; the indices that need not be asked for again."""
        here: set[int] = set()
        for index, answer in zip(asked, answers, strict=False):
            if index >= self._end:
                break
            if isinstance(answer, Resident):
                here.add(index)
                copy = msgspec.structs.replace(self._promise.copies[index], answer=answer)
                self._arrived(Arrival(index, copy))
            elif not isinstance(answer, OnDisk):
                self._lose(index, answer.reason if isinstance(answer, Miss) else MissReason.FILLING)
        return here

    def _lose(self, index: int, reason: MissReason) -> None:
        """The chain ends at this index, unless it has ended before."""
        if index < self._end:
            self._end = index
            self._arrived(Arrival(index, reason=reason))
