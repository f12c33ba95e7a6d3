"""What the client knows about where keys are: the index, behind a breaker, and the nodes it last hit.

The index may be unknown (no node has told it yet), down or slow; then readers ask the nodes directly.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from kvstore.client.breaker import Breaker
from kvstore.client.peers import Peer, Peers
from kvstore.client.plan import of_each
from kvstore.core import BadConfiguration, IndexDown, Key, Namespace
from kvstore.index import Index, Location, Membership, RedisIndex

log = logging.getLogger(__name__)


class Directory:
    """Finds the nodes that say they hold a key.

    Args:
        peers: is told which nodes are alive, and tells what the preferred node says of the index.
        breaker: for the index; probed by `refresh`.
        index: an index that is already there; None: one is connected as soon as its URL is known.
        index_url: of Redis; empty: what the preferred node says.
        timeout_s: of one question to Redis.
        hits_max: how many nodes are remembered as recently useful.

    Raises:
        BadConfiguration: `index_url` cannot be read.
    """

    def __init__(
        self,
        peers: Peers,
        breaker: Breaker,
        *,
        index: Index | None,
        index_url: str,
        timeout_s: float,
        hits_max: int,
    ) -> None:
        self.breaker = breaker
        self._peers = peers
        self._timeout_s = timeout_s
        self._owned = index is None
        self._follows = index is None and not index_url  # whatever the preferred node says
        self._followed_url = ""
        if index_url and index is None:
            index = RedisIndex.connect(index_url, timeout_s=timeout_s)
        self._index = index
        self._hits_max = hits_max
        self._hits: OrderedDict[str, None] = OrderedDict()
        self._membership = None if index is None else Membership(index)

    @property
    def has_index(self) -> bool:
        """Whether there is an index that could be asked, up or down."""
        return self._index is not None

    async def refresh(self) -> None:
        """Connects when the index becomes known, and asks it which nodes are alive. Never raises IndexDown."""
        if self._follows:
            await self._follow_url()
        if self._membership is None or not (self.breaker.closed or self.breaker.begin_probe()):
            return
        try:
            await self._membership.refresh()
        except IndexDown:
            self.breaker.failure()
        else:
            self.breaker.success()
        self._peers.members(self._membership.alive())

    async def locate(self, keys: Sequence[Key]) -> list[tuple[Location, ...]] | None:
        """Alive holders of the keys of a chain, up to the first key without one; None: the index is not there."""
        located = None if self._index is None else await self._alive_of(self._index.lookup, keys)
        return located if located is None or () not in located else located[: located.index(())]

    async def holders(self, keys: Sequence[Key]) -> list[tuple[Location, ...]] | None:
        """Alive holders of each of these keys, which are no chain; None: the index is not there."""
        return None if self._index is None else await self._alive_of(self._index.holders, keys)

    async def _alive_of(
        self, ask: Callable[[Sequence[Key]], Awaitable[list[tuple[Location, ...]]]], keys: Sequence[Key]
    ) -> list[tuple[Location, ...]] | None:
        if self._membership is None or not self.breaker.closed:
            return None
        try:
            found = await ask(keys)
        except IndexDown:
            self.breaker.failure()
            return None
        self.breaker.success()
        return of_each(found, self._alive)

    def _alive(self, locations: tuple[Location, ...]) -> tuple[Location, ...]:
        return tuple(one for one in locations if self._peers.named(one.node) is not None)

    def hit(self, peer: Peer) -> None:
        """Remembers a node that has just been useful."""
        if peer is not self._peers.local:
            self._hits[peer.control.control] = None
            self._hits.move_to_end(peer.control.control)
            while len(self._hits) > self._hits_max:
                self._hits.popitem(last=False)

    def fallback(self) -> list[Peer]:
        """Whom to ask without an index: the preferred node, and those that were useful lately."""
        return [self._peers.local, *(self._peers.at(control) for control in reversed(self._hits))]

    async def manifest(self, namespace: Namespace) -> bytes | None:
        """A namespace's manifest, if the index is there and remembers it."""
        if self._index is None or not self.breaker.closed:
            return None
        try:
            return await self._index.manifest(namespace)
        except IndexDown:
            self.breaker.failure()
            return None

    async def close(self) -> None:
        """Gives the index back, if it was connected here."""
        if self._owned:
            await self._close_index()

    async def _close_index(self) -> None:
        if self._index is not None:
            with contextlib.suppress(IndexDown):  # then there is nothing left to give back
                await self._index.close()

    async def _follow_url(self) -> None:
        welcome = self._peers.local.control.welcome
        url = "" if welcome is None else welcome.index_url
        if not url or url == self._followed_url:
            return
        self._followed_url = url
        await self._close_index()
        try:
            self._index = RedisIndex.connect(url, timeout_s=self._timeout_s)
            self._membership = Membership(self._index)
        except BadConfiguration as error:
            self._index = self._membership = None
            control = self._peers.local.control.control
            log.warning("node %s names an index that cannot be used, working without: %s", control, error)
