"""Writing: where objects are placed, one Commit per node, and giving back what will not be committed."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvstore.client.breaker import BreakerOpen
from kvstore.client.control import REFUSALS, TROUBLE
from kvstore.client.peers import Peer, Peers
from kvstore.client.plan import batches
from kvstore.client.promise import Grant, Grants
from kvstore.client.reading import reason_of
from kvstore.core import Key, MissReason, Namespace, PeerLost, limits
from kvstore.wire import (
    Abort,
    Commit,
    CommitAnswer,
    CommitDone,
    CommitItem,
    Drop,
    Granted,
    Refused,
    ReplyBody,
    RequestBody,
    Reserve,
    Reserved,
    ReserveItem,
    Stale,
)

log = logging.getLogger(__name__)

COMMIT_ATTEMPTS = 2  # a Commit whose reply was lost is simply said again: the second changes nothing


class Writer:
    """The writing half of a client. Nothing here raises because a node is down."""

    def __init__(
        self,
        peers: Peers,
        clock: Callable[[], float],
        others_max: int,
        item_bytes: Mapping[Namespace, int],
    ) -> None:
        self._peers = peers
        self._item_bytes = item_bytes
        self._clock = clock
        self._others_max = others_max
        self._asking: Counter[tuple[Peer, Key]] = Counter()  # what Reserves under way ask for

    async def reserve(self, namespace: Namespace, items: Sequence[ReserveItem], duration_s: float) -> Grants:
        """See `Client.reserve`."""
        started = self._clock()
        grants = [Grant(item, Refused(MissReason.NODE_DOWN), None) for item in items]
        try:
            for number in range(1 + self._others_max):
                refused = [index for index, grant in enumerate(grants) if isinstance(grant.answer, Refused)]
                peer = self._choice(number)
                if not refused or peer is None:
                    break
                await self._place(namespace, grants, refused, peer, duration_s)
        except BaseException:  # the caller has gone: nothing was written, nothing will be
            for peer, abort in self._aborts(namespace, grants, quiet=True):
                peer.post(abort)
            raise
        return Grants(namespace, tuple(grants), started + min(duration_s, limits.RESERVATION_S_MAX))

    async def commit(
        self, namespace: Namespace, items: Sequence[tuple[Grant, bytes]]
    ) -> tuple[CommitAnswer, ...]:
        """See `Client.commit`."""
        answers: list[CommitAnswer] = [Stale()] * len(items)
        groups: dict[Peer, list[int]] = {}
        for index, (grant, _) in enumerate(items):
            groups.setdefault(self._peer(grant), []).append(index)

        async def ask(peer: Peer, indices: list[int]) -> None:
            for batch in batches(indices, self._item_bytes[namespace]):
                body = Commit(namespace, tuple(commit_item(*items[index]) for index in batch))
                done = await self._say_again(peer, namespace, body)
                if isinstance(done, CommitDone):
                    for index, answer in zip(batch, done.answers, strict=True):
                        answers[index] = answer

        await asyncio.gather(*(ask(peer, indices) for peer, indices in groups.items()))
        return tuple(answers)

    async def abort(self, namespace: Namespace, grants: Sequence[Grant], quiet: bool) -> None:
        """See `Client.abort`."""

        async def tell(peer: Peer, body: Abort) -> None:
            try:
                await peer.ask(body, namespace=namespace)
            except TROUBLE:
                return  # counted by the breaker; the reservation's duration ends it

        await asyncio.gather(*(tell(*one) for one in self._aborts(namespace, grants, quiet)))

    async def drop(self, namespace: Namespace, keys: Sequence[Key], peer: Peer) -> bool:
        """Has one node forget objects; whether it heard."""
        try:
            for batch in batches(keys):
                await peer.ask(Drop(namespace, tuple(batch)), namespace=namespace)
        except TROUBLE:
            return False
        return True

    def _choice(self, number: int) -> Peer | None:
        """The preferred node first, then the others by their free bytes."""
        if number == 0:
            return self._peers.local
        others = self._peers.others()
        return others[number - 1] if number <= len(others) else None

    async def _place(
        self, namespace: Namespace, grants: list[Grant], wanted: Sequence[int], peer: Peer, duration_s: float
    ) -> None:
        """Offers the wanted objects to one node and enters its answers."""
        for batch in batches(wanted):
            body = Reserve(namespace, tuple(grants[index].item for index in batch), duration_s)

            def undo(late: ReplyBody, body: Reserve = body) -> RequestBody | None:
                # A key that is asked for again will be granted with the same generation: it is not to be taken back.
                return _give_back(body, late, lambda key: self._asking[peer, key] > 0)

            asked = [(peer, item.key) for item in body.items]
            self._asking.update(asked)
            try:
                answer = await peer.ask(body, namespace=namespace, undo=undo)
            except TROUBLE as error:
                for index in batch:
                    grants[index] = Grant(grants[index].item, Refused(reason_of(error)), None)
                continue
            finally:
                self._asking.subtract(asked)
                self._asking = +self._asking  # forgets what nobody asks for
            answers = answer.body.answers if isinstance(answer.body, Reserved) else ()
            for index, one in zip(batch, answers, strict=True):
                grants[index] = Grant(grants[index].item, one, answer.address)

    async def _say_again(self, peer: Peer, namespace: Namespace, body: Commit) -> ReplyBody | None:
        """The answer; None when the node refuses, is in trouble, or did not answer several times."""
        for attempts_left in reversed(range(COMMIT_ATTEMPTS)):
            try:
                return (await peer.ask(body, namespace=namespace)).body
            except (BreakerOpen, *REFUSALS):
                return None
            except PeerLost as error:
                if not attempts_left:
                    log.warning("objects may or may not be visible: their commit was not answered: %s", error)
        return None

    def _aborts(self, namespace: Namespace, grants: Sequence[Grant], quiet: bool) -> list[tuple[Peer, Abort]]:
        groups: dict[Peer, list[Grant]] = {}
        for grant in grants:
            if grant.granted is not None:
                groups.setdefault(self._peer(grant), []).append(grant)
        return [
            (
                peer,
                Abort(namespace, tuple((g.item.key, g.granted.generation) for g in some if g.granted), quiet),
            )
            for peer, whole in groups.items()
            for some in batches(whole)
        ]

    def _peer(self, grant: Grant) -> Peer:
        assert grant.address is not None, "only what was granted can be committed or aborted"
        return self._peers.reach(grant.address) or self._peers.at(grant.address.control)


def commit_item(grant: Grant, table: bytes) -> CommitItem:
    """What publishes one filled object."""
    assert grant.granted is not None, "only what was granted can be committed"
    return CommitItem(grant.item.key, grant.granted.generation, table)


def _give_back(body: Reserve, late: ReplyBody, spared: Callable[[Key], bool]) -> RequestBody | None:
    """The Abort for grants that came when nobody waited for them any more."""
    if not isinstance(late, Reserved):
        return None
    granted = tuple(
        (item.key, answer.generation)
        for item, answer in zip(body.items, late.answers, strict=False)
        if isinstance(answer, Granted) and not spared(item.key)
    )
    return Abort(body.namespace, granted, quiet=True) if granted else None
