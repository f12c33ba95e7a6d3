"""A node tells the index what it holds. Level-triggered: events only say *which* keys to look at.

    mark(key)  --->  dirty keys  --+
                                   +-->  batch --> tier_of(key), now --> Index.merge
    mark_all() --->  a pass over --+       ^                                 |
                     all keys              +--- dirty again, on IndexDown ---+

One sender per node takes a batch, reads the *present* state of its keys, and sends that. A key leaves
the dirty set before its state is read, so a change during the send marks it again and it is sent again;
with one sender, the last thing the index hears of a key is its last state. Nothing else repairs the
index: whoever finds an entry wrong marks its key.

A pass visits all keys: at boot, when the index says that it lost its data, when more keys are dirty than
may wait, and again and again: entries expire, and an index that lost or changed single entries tells nobody.
How soon again follows from how many keys there are, so that it costs a few keys a second on average: 10,000
keys every 40 s, a million every hour. A pass goes in batches, behind dirty keys, and rests as long as
each batch took, so that it never takes more than half of a node's way to Redis.

An index that is down costs nothing but publishing: keys stay dirty, attempts back off to
`HEARTBEAT_S`, the first failure and the recovery are each logged once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from kvstore.core import IndexDown, Key, Tier
from kvstore.core.limits import (
    HEARTBEAT_EXPIRY_S,
    HEARTBEAT_S,
    INDEX_BATCH_KEYS_MAX,
    INDEX_DIRTY_KEYS_MAX,
    INDEX_PASS_KEYS_PER_S,
    INDEX_PASS_S,
    INDEX_PASS_S_MIN,
)
from kvstore.index.base import Index, NodeRecord
from kvstore.wire import NodeId

_BACKOFF_FIRST_S = 0.05

_log = logging.getLogger(__name__)


class PublisherStats(NamedTuple):
    """How publishing goes. Counts are since start."""

    up: bool  # the last call to the index succeeded
    pending_keys: int  # dirty, or in the batch being sent
    in_pass: bool
    sent_keys: int
    sent_batches: int
    passes: int  # begun
    failures: int  # calls that the index did not answer
    losses: int  # heartbeats that said the index has lost its data
    overflows: int  # times that more keys were dirty than may wait


class Publisher:
    """Publishes one node's keys and its heartbeat.

    Args:
        index: where to.
        node: this node's id.
        tier_of: the tier in which the node holds a key at this moment, or None.
        all_keys: a new iterator over all keys held, and maybe others. It is read in slices, between which the
            node goes on: it must bear changes meanwhile (keys that come or go are marked one by one anyway).
        record: what the heartbeat says, read each time.
        pass_s: seconds from one pass over all keys to the next, at the latest.
    """

    def __init__(
        self,
        index: Index,
        node: NodeId,
        tier_of: Callable[[Key], Tier | None],
        all_keys: Callable[[], Iterator[Key]],
        *,
        record: Callable[[], NodeRecord],
        pass_s: float = INDEX_PASS_S,
    ) -> None:
        self._index = index
        self._node = node
        self._tier_of = tier_of
        self._all_keys = all_keys
        self._record = record
        self._pass_s = pass_s
        self._dirty: dict[Key, None] = {}  # a set that keeps its order: first marked, first sent
        self._sending: list[Key] = []
        self._pass: Iterator[Key] | None = None
        self._pass_wanted = True  # boot
        self._pass_keys = 0  # seen in the last pass, or so far in this one
        self._wake = asyncio.Event()
        self._told = asyncio.Event()  # the first pass is over, or the index is down
        self._up = True
        self._sent_keys = self._sent_batches = self._passes = 0
        self._failures = self._losses = self._overflows = 0

    def mark(self, key: Key) -> None:
        """Says that the state of `key` may have changed. Cheap; from the node's loop only."""
        if len(self._dirty) >= INDEX_DIRTY_KEYS_MAX and key not in self._dirty:
            # What is held is found again by the pass; entries of what is not held any more expire.
            self._dirty.clear()
            self._overflows += 1
            self.mark_all()
        self._dirty[key] = None
        self._wake.set()

    def mark_all(self) -> None:
        """Says that the index may be wrong about any key: a pass over all of them begins soon."""
        self._pass_wanted = True
        self._wake.set()

    async def first_pass(self) -> None:
        """Returns when the index knows all that was held at the start, or does not answer."""
        await self._told.wait()

    @property
    def pending(self) -> int:
        """Keys whose present state the index has not confirmed, those of a pass not counted."""
        return len(self._dirty) + len(self._sending)

    @property
    def settled(self) -> bool:
        """Everything that was marked is confirmed, and no pass is under way or wanted."""
        return not (self.pending or self._pass_wanted or self._pass is not None)

    @property
    def stats(self) -> PublisherStats:
        """A snapshot for admin and metrics."""
        return PublisherStats(
            up=self._up,
            pending_keys=self.pending,
            in_pass=self._pass is not None,
            sent_keys=self._sent_keys,
            sent_batches=self._sent_batches,
            passes=self._passes,
            failures=self._failures,
            losses=self._losses,
            overflows=self._overflows,
        )

    async def run(self) -> None:
        """Publishes until cancelled; then withdraws the heartbeat if the index answers."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat(), name="index heartbeat")
                tasks.create_task(self._renew(), name="index pass")
                tasks.create_task(self._send_for_ever(), name="index sender")
        finally:
            await self._leave()

    async def _beat(self) -> None:
        while True:
            try:
                kept = await self._index.heartbeat(self._record(), HEARTBEAT_EXPIRY_S)
            except IndexDown as error:
                self._failed(error)
            else:
                self._succeeded()
                if not kept:
                    self._losses += 1
                    _log.warning("the index has lost its data; publishing all keys again")
                    self.mark_all()
            await asyncio.sleep(HEARTBEAT_S)

    async def _renew(self) -> None:
        rest_s, since_s = min(self._pass_s, INDEX_PASS_S_MIN), 0.0
        while True:
            await asyncio.sleep(rest_s)
            since_s += rest_s
            if since_s >= min(self._pass_s, self._pass_keys / INDEX_PASS_KEYS_PER_S):
                since_s = 0.0
                self.mark_all()

    async def _send_for_ever(self) -> None:
        clock = asyncio.get_running_loop().time
        backoff_s = _BACKOFF_FIRST_S
        while True:
            if self.settled:
                self._wake.clear()
                await self._wake.wait()
            urgent = bool(self._dirty)
            began = clock()
            try:
                await self._send()
            except IndexDown as error:
                self._failed(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, HEARTBEAT_S)
            else:
                backoff_s = _BACKOFF_FIRST_S
                await asyncio.sleep(0 if urgent else clock() - began)

    async def _send(self) -> None:
        """Sends one batch, or leaves its keys dirty."""
        batch = self._sending = self._take()
        try:
            if batch:
                await self._index.merge(self._node, {key: self._tier_of(key) for key in batch})
        except BaseException:  # also when cancelled: whether it arrived is unknown
            self._dirty.update(dict.fromkeys(batch))
            raise
        finally:
            self._sending = []
        if self._passes and self._pass is None:
            self._told.set()
        if batch:
            self._sent_keys += len(batch)
            self._sent_batches += 1
            self._succeeded()

    def _take(self) -> list[Key]:
        """The next batch: dirty keys first, filled up from the pass."""
        batch = dict.fromkeys(islice(self._dirty, INDEX_BATCH_KEYS_MAX))
        for key in batch:
            del self._dirty[key]
        if self._pass is None and self._pass_wanted:
            self._pass_wanted = False
            self._passes += 1
            self._pass_keys = 0
            self._pass = self._all_keys()
        if self._pass is not None:
            room = INDEX_BATCH_KEYS_MAX - len(batch)
            slice_of_pass = list(
                islice(self._pass, room)
            )  # bounds what is looked at, whatever is held of it by now
            held = [key for key in slice_of_pass if self._tier_of(key) is not None]
            batch.update(dict.fromkeys(held))
            self._pass_keys += len(held)
            if len(slice_of_pass) < room:
                self._pass = None
        return list(batch)

    def _failed(self, error: IndexDown) -> None:
        self._failures += 1
        self._told.set()
        if self._up:
            self._up = False
            _log.warning("%s", error)

    def _succeeded(self) -> None:
        if not self._up:
            self._up = True
            _log.info("the index answers again; %d keys are waiting to be published", self.pending)

    async def _leave(self) -> None:
        try:
            await self._index.leave(self._node)
        except IndexDown as error:
            _log.info("the heartbeat was not withdrawn and expires by itself: %s", error)

    def __repr__(self) -> str:
        return f"<Publisher {'up' if self._up else 'down'}, {self.pending} pending, {self._sent_keys} sent>"
