"""Reading: lookup without a lease, Acquire over the nodes involved, and what is done with a promise."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvstore.client.acquiring import Attempt
from kvstore.client.address import NodeAddress
from kvstore.client.breaker import BreakerOpen
from kvstore.client.control import TROUBLE
from kvstore.client.directory import Directory
from kvstore.client.peers import Peer, Peers
from kvstore.client.plan import batches, of_each
from kvstore.client.promise import Copy, Found, Promise
from kvstore.core import BadRequest, Key, MissReason, Namespace, NotAuthorised, Overloaded, Tier, limits
from kvstore.index import Location
from kvstore.wire import (
    Acquired,
    LeaseId,
    LeaseState,
    NodeId,
    OnDisk,
    Prefetch,
    Release,
    Renew,
    Resident,
    Suspect,
    Verdict,
)

Whom = NodeAddress | NodeId
VERIFY_S = 10.0  # what a node may take to verify a suspected copy
LeaseGroup = tuple[NodeAddress, LeaseId, list[Copy]]


class Reader:
    """The reading half of a client. Deadlines: `ClientConfig`; nothing here raises because a node is down."""

    def __init__(
        self,
        peers: Peers,
        directory: Directory,
        clock: Callable[[], float],
        rounds_max: int,
        item_bytes: Mapping[Namespace, int],
        *,
        sealed: bool,
    ) -> None:
        self._sealed = sealed
        self._peers = peers
        self._directory = directory
        self._clock = clock
        self._rounds_max = rounds_max
        self._item_bytes = item_bytes

    async def lookup(self, keys: Sequence[Key]) -> Found:
        """See `Client.lookup`."""
        located = await self._directory.locate(keys)
        if located is None:
            return Found(0, (), MissReason.INDEX_DOWN)
        nodes = dict.fromkeys(of_each(located, self._best))
        reason = None if len(located) == len(keys) else MissReason.NEVER_STORED
        return Found(len(located), tuple(nodes), reason, of_each(located, _on_disk).count(True))

    async def present(self, keys: Sequence[Key]) -> list[bool] | None:
        """See `Client.present`."""
        held = await self._directory.holders(keys)
        return None if held is None else [bool(locations) for locations in held]

    async def acquire(
        self,
        namespace: Namespace,
        keys: Sequence[Key],
        duration_s: float,
        wait_s: float,
        first: Sequence[Whom],
    ) -> Promise:
        """See `Client.acquire`.

        The preferred node is asked first: it is near, and often holds all there is. The index is asked for the rest.
        """
        started = self._clock()
        local = self._peers.local
        attempt = Attempt(namespace, keys, duration_s)
        kept: Sequence[Copy] = ()
        located: Sequence[Sequence[Location]] | None = ()
        try:
            at_once = bool(keys) and local.breaker.closed and not (first or wait_s)
            if at_once:
                await self._ask(attempt, local, attempt.all_of(local), 0.0)
            if (known := attempt.num_promised) < len(keys):
                located = await self._directory.locate(keys[known:])
                attempt.know(known, *self._holders(keys[known:], located, first, at_once))
                for _ in range(self._rounds_max):
                    if not await self._round(attempt, max(0.0, wait_s - (self._clock() - started))):
                        break
            kept, reason = attempt.outcome()
        finally:  # also when this call is cancelled: then nothing is kept
            for peer, release in attempt.surplus(kept):
                peer.post(release)
        if located is None and self._directory.has_index and reason is MissReason.NEVER_STORED:
            reason = MissReason.INDEX_DOWN  # another node may well hold it
        # Counted from before the first request: the nodes count from later.
        return Promise(namespace, tuple(kept), started + min(duration_s, limits.LEASE_S_MAX), reason)

    async def renew(self, promise: Promise, duration_s: float) -> float:
        """See `Client.renew`."""

        async def ask(address: NodeAddress, lease: LeaseId, _: list[Copy]) -> float:
            try:
                body = (await self._peer(address).ask(Renew(lease, duration_s))).body
            except TROUBLE:
                return 0.0
            return body.remaining_s if isinstance(body, LeaseState) else 0.0

        return min(await asyncio.gather(*(ask(*group) for group in by_lease(promise.copies))), default=0.0)

    async def release(self, promise: Promise, keys: Sequence[Key], cold: bool) -> None:
        """See `Client.release`."""
        given_back = set(keys)

        async def tell(address: NodeAddress, lease: LeaseId, copies: list[Copy]) -> None:
            chosen = tuple(copy.key for copy in copies if copy.key in given_back)
            if keys and not chosen:
                return
            try:
                for batch in batches(chosen) or [()]:
                    await self._peer(address).ask(Release(lease, tuple(batch), cold))
            except TROUBLE:
                return  # counted by the breaker; the lease's duration ends it

        groups = by_lease(promise.copies)
        if len(groups) == 1:  # without a task of its own: it is sent before anything that is asked later
            await tell(*groups[0])
        else:
            await asyncio.gather(*(tell(*group) for group in groups))

    async def suspect(self, namespace: Namespace, copy: Copy) -> bool:
        """See `Client.suspect`."""
        body = Suspect(namespace, copy.key, copy.answer.generation, copy.lease)
        try:
            answer = await self._peer(copy.address).ask(body, namespace=namespace, wait_s=VERIFY_S)
        except TROUBLE:
            return False
        return isinstance(answer.body, Verdict) and answer.body.bad

    async def prefetch(self, namespace: Namespace, keys: Sequence[Key]) -> None:
        """See `Client.prefetch`."""
        wanted: dict[Peer, list[Key]] = {}
        for key, locations in zip(keys, await self._directory.locate(keys) or (), strict=False):
            peer = self._peers.named(self._best(locations))
            if peer is not None and _on_disk(locations):
                wanted.setdefault(peer, []).append(key)

        async def tell(peer: Peer, some: list[Key]) -> None:
            with contextlib.suppress(*TROUBLE):  # it was a hint
                for batch in batches(some):
                    await peer.ask(Prefetch(namespace, tuple(batch)), namespace=namespace)

        await asyncio.gather(*(tell(*one) for one in wanted.items()))

    async def _round(self, attempt: Attempt, wait_s: float) -> bool:
        """Asks each node that could add to the prefix, all at once. False: there was none."""
        questions = [self._ask(attempt, *group, wait_s) for group in attempt.next_round().items()]
        if len(questions) == 1:
            await questions[0]  # without a task of its own, and so a turn of the loop sooner
        else:
            await asyncio.gather(*questions)
        return bool(questions)

    async def _ask(self, attempt: Attempt, peer: Peer, asked: Sequence[int], wait_s: float) -> None:
        for batch in batches(asked, self._item_bytes[attempt.namespace]):
            request = attempt.request(peer, batch, wait_s, self._sealed)
            try:
                answer = await peer.ask(request, namespace=attempt.namespace, wait_s=wait_s)
            except TROUBLE as error:
                attempt.failed(peer, reason_of(error))
                return
            answers = answer.body.answers if isinstance(answer.body, Acquired) else ()
            attempt.answered(peer, batch, answer.address, answers)
            if not answers or not isinstance(answers[-1], Resident | OnDisk):
                return
            self._directory.hit(peer)

    def _holders(
        self,
        keys: Sequence[Key],
        located: Sequence[Sequence[Location]] | None,
        first: Sequence[Whom],
        asked: bool,
    ) -> tuple[list[Sequence[Peer]], list[Peer]]:
        """(Who may hold each key, the favourites among them), in order of preference.

        The preferred node is asked for what it is said to hold, then the nodes of a hand-off, then the
        others. Beyond what the index knows the preferred node is asked all the same, unless it was `asked`
        already: it may know better.
        """
        local = self._peers.local
        handed = [peer for whom in first if (peer := self._peers.reach(whom)) is not None]
        if located is None:
            everybody = unique([*handed, *self._directory.fallback()])
            return [everybody for _ in keys], everybody
        favourites = unique([*handed, local])

        def holding(locations: Sequence[Location]) -> Sequence[Peer]:
            known = [peer for one in locations if (peer := self._peers.named(one.node)) is not None]
            return unique([*(peer for peer in known if peer is local), *handed, *known])

        beyond = [] if asked else favourites
        return of_each(located, holding) + [beyond] * (len(keys) - len(located)), favourites

    def _best(self, locations: Sequence[Location]) -> NodeId:
        local = self._peers.local.node
        return next((one.node for one in locations if one.node == local), locations[-1].node)

    def _peer(self, address: NodeAddress) -> Peer:
        return self._peers.reach(address) or self._peers.at(address.control)


def _on_disk(locations: Sequence[Location]) -> bool:
    """Whether a copy must be promoted first, wherever it is read."""
    return all(location.tier is not Tier.DRAM for location in locations)


def by_lease(copies: Iterable[Copy]) -> list[LeaseGroup]:
    """The copies of each lease, with the node that gave it."""
    groups: dict[LeaseId, LeaseGroup] = {}
    for copy in copies:
        groups.setdefault(copy.lease, (copy.address, copy.lease, []))[2].append(copy)
    return list(groups.values())


def reason_of(error: Exception) -> MissReason:
    """Why keys are missed when a node does not answer, or not to us."""
    match error:
        case BreakerOpen():
            return MissReason.BREAKER_OPEN
        case NotAuthorised():
            return MissReason.NOT_AUTHORISED
        case BadRequest():
            return MissReason.MANIFEST_DIFFERS
        case Overloaded():
            return MissReason.NO_ROOM
        case _:
            return MissReason.NODE_DOWN


def unique(peers: Iterable[Peer]) -> list[Peer]:
    """Each once, in order."""
    return list(dict.fromkeys(peers))
