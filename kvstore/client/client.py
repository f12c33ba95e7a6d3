"""The async client: everything an engine's scheduler half asks of the store.

One object per process, on one event loop. It finds nodes through the index, talks to each over one
connection, and keeps three promises to an engine: no call waits without a deadline; a node or an index that
is down is an answer (a reason), not an exception; a call that is cancelled gives back what it had taken.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kvstore.client.address import NodeAddress
from kvstore.client.breaker import Breaker
from kvstore.client.config import ClientConfig
from kvstore.client.control import TROUBLE
from kvstore.client.directory import Directory
from kvstore.client.peers import Peers
from kvstore.client.plan import item_bytes
from kvstore.client.promise import Copy, Found, Grant, Grants, Promise
from kvstore.client.promoting import Arrived, Promotion
from kvstore.client.reading import Reader, Whom
from kvstore.client.writing import Writer
from kvstore.core import BadConfiguration, BadRequest, Key, Manifest, Namespace, PeerLost, limits
from kvstore.index import Index
from kvstore.wire import CommitAnswer, Hello, NodeId, Report, ReportItem, ReserveItem, Welcome

log = logging.getLogger(__name__)

PRUNE_ROUNDS = 30  # of the heartbeat; then connections that were not used are given up


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A frozen picture: nodes with a connection, and how their breakers and the index's stand."""

    nodes: int
    nodes_in_trouble: int
    breakers_opened: int
    index_reachable: bool
    index_breaker_opened: int


class Client:
    """Asks nodes and index. All calls on the loop that ran `start`.

    Args:
        config: see `ClientConfig`.
        index: an index to use instead of connecting to Redis; it stays the caller's.
        clock: seconds, only growing; what `expires_at` counts in.
        rng: spreads probes.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        index: Index | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._index = index
        self._clock = clock
        self._rng = rng or random.Random()
        self._manifests: dict[Namespace, bytes] = {}
        self._item_bytes: dict[Namespace, int] = {}
        self._chores: asyncio.Task[None] | None = None
        self._started = False

    async def start(self) -> None:
        """Greets the preferred node and finds the index, as far as they are there. Never fails for a node's sake.

        Raises:
            BadConfiguration: the node's address or the index's URL cannot be read.
        """
        config = self._config
        self._peers = Peers(config, self._manifests, self._clock, self._rng)
        try:
            self._directory = Directory(
                self._peers,
                Breaker(self._clock, self._rng, probe_s=config.probe_s, probe_s_max=config.probe_s_max),
                index=self._index,
                index_url=config.index_url,
                timeout_s=config.index_timeout_s,
                hits_max=config.other_nodes_max,
            )
        except BadConfiguration:
            await self._peers.close()
            raise
        self._reader = Reader(
            self._peers,
            self._directory,
            self._clock,
            1 + config.other_nodes_max,
            self._item_bytes,
            sealed=config.whole_objects,
        )
        self._writer = Writer(self._peers, self._clock, config.other_nodes_max, self._item_bytes)
        self._started = True
        await self._round()
        self._chores = asyncio.get_running_loop().create_task(self._keep_up())

    async def close(self) -> None:
        """Ends connections. What is still leased or reserved ends by its duration."""
        if not self._started:
            return
        self._started = False
        if self._chores is not None:
            self._chores.cancel()
            await asyncio.wait([self._chores])
        await self._directory.close()
        await self._peers.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def stats(self) -> ClientStats:
        """How the client stands."""
        breakers = [peer.breaker for peer in self._peers.all()]
        return ClientStats(
            nodes=len(breakers),
            nodes_in_trouble=sum(not breaker.closed for breaker in breakers),
            breakers_opened=sum(breaker.opened_total for breaker in breakers),
            index_reachable=self._directory.has_index and self._directory.breaker.closed,
            index_breaker_opened=self._directory.breaker.opened_total,
        )

    @property
    def welcome(self) -> Welcome | None:
        """What the preferred node says of itself; None until it has been reached."""
        return self._peers.local.control.welcome

    @property
    def address(self) -> NodeAddress | None:
        """Where the preferred node's arena is; None until it has been reached."""
        return self._peers.local.control.address

    async def open(self, manifest: Manifest) -> Namespace:
        """Opens a namespace: from now on its keys may be asked for. Greets the preferred node with it.

        Raises:
            BadRequest, NotAuthorised: the preferred node is there and refuses (manifest, version, token).
        """
        namespace = manifest.namespace
        self._manifests[namespace] = manifest.encode()
        self._item_bytes[namespace] = item_bytes(manifest.geometry.num_runs)
        with contextlib.suppress(PeerLost):  # counted by its breaker; nodes are greeted when they are asked
            await self._peers.local.ask(Hello(), namespace=namespace)
        return namespace

    async def lookup(self, namespace: Namespace, keys: Sequence[Key]) -> Found:
        """What the index says of a chain: no lease, no node is asked. At most two round trips to the index.

        With reason `index_down` nothing is known; `acquire` then asks nodes directly.
        """
        self._check(namespace)
        return await self._reader.lookup(keys)

    async def present(self, namespace: Namespace, keys: Sequence[Key]) -> list[bool] | None:
        """Which of these keys, which are no chain, the index says are held; None: it is not there."""
        self._check(namespace)
        return await self._reader.present(keys)

    async def acquire(
        self,
        namespace: Namespace,
        keys: Sequence[Key],
        duration_s: float,
        *,
        wait_s: float = 0.0,
        first: Sequence[Whom] = (),
    ) -> Promise:
        """Leases the longest prefix of a chain that is to be had, each key from one node.

        Args:
            namespace: of the keys.
            keys: the chain, in order.
            duration_s: of the leases, at most `LEASE_S_MAX` in total.
            wait_s: wait so long for the first key that is being written, or was not seen yet (hand-off).
            first: nodes of a hand-off, asked before others for what the preferred node does not hold.
        """
        self._check(namespace)
        return await self._reader.acquire(namespace, keys, duration_s, min(wait_s, limits.WAIT_S_MAX), first)

    async def promote(self, promise: Promise, timeout_s: float, arrived: Arrived) -> None:
        """Brings the copies of a promise that are on NVMe into DRAM, in order, as far as there is room for them.

        `arrived` is told of each as it comes, or of where the chain ends early; then nothing behind is waited for.
        Releasing single keys meanwhile makes room for later ones. Ends with `promote_deadline` after `timeout_s`.
        """
        self._check(promise.namespace)
        sealed = self._config.whole_objects
        await Promotion(
            self._peers, self._clock, self._item_bytes, promise, timeout_s, arrived, sealed=sealed
        ).run()

    async def renew(self, promise: Promise, duration_s: float) -> float:
        """Prolongs a promise. Returns the seconds that all its leases have left; 0 when one is gone."""
        return await self._reader.renew(promise, duration_s)

    async def release(self, promise: Promise, keys: Sequence[Key] = (), *, cold: bool = False) -> None:
        """Ends a promise for these keys, or for all. `cold`: first to be evicted unless others use them."""
        await self._reader.release(promise, keys, cold)

    async def suspect(self, namespace: Namespace, copy: Copy) -> bool:
        """Has a node verify a leased copy whose bytes did not match. True: it was bad and is dropped."""
        self._check(namespace)
        return await self._reader.suspect(namespace, copy)

    async def reserve(self, namespace: Namespace, items: Sequence[ReserveItem], duration_s: float) -> Grants:
        """Asks for the right to write objects: the preferred node first, others where it refuses or is down.

        Objects that nobody takes carry `Refused` and its reason.
        """
        self._check(namespace)
        return await self._writer.reserve(namespace, items, duration_s)

    async def commit(
        self, namespace: Namespace, items: Sequence[tuple[Grant, bytes]]
    ) -> tuple[CommitAnswer, ...]:
        """Publishes filled objects, given with their tables. Only after every transfer of every rank succeeded.

        `Stale`: nothing of that object became visible, or its node cannot be reached to say so.
        """
        self._check(namespace)
        return await self._writer.commit(namespace, items)

    async def abort(self, namespace: Namespace, grants: Sequence[Grant], *, quiet: bool) -> None:
        """Gives grants back. `quiet`: every transfer has ended or never began, nothing can land late."""
        self._check(namespace)
        await self._writer.abort(namespace, grants, quiet)

    async def report(self, items: Sequence[ReportItem]) -> None:
        """Tells the preferred node what became of requests. Best effort."""
        size = limits.REPORTS_PER_CALL_MAX
        for start in range(0, len(items), size):
            self._peers.local.post(Report(tuple(items[start : start + size])))

    async def drop(self, namespace: Namespace, keys: Sequence[Key], nodes: Sequence[NodeId] = ()) -> int:
        """Administration: has nodes (empty: all that are alive) forget objects. How many nodes heard it."""
        self._check(namespace)
        named = [self._peers.named(node) for node in nodes]
        peers = [peer for peer in named if peer is not None]
        if not nodes:
            peers = [self._peers.local, *self._peers.others()]
        heard = 0
        for peer in peers:
            heard += await self._writer.drop(namespace, keys, peer)
        return heard

    async def prefetch(self, namespace: Namespace, keys: Sequence[Key]) -> None:
        """A hint that keys on NVMe will be asked for. No lease, best effort."""
        self._check(namespace)
        await self._reader.prefetch(namespace, keys)

    async def manifest(self, namespace: Namespace) -> bytes | None:
        """What the index remembers of a namespace: for tools and diagnosis."""
        return await self._directory.manifest(namespace)

    async def _keep_up(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(limits.HEARTBEAT_S)
            rounds += 1
            try:
                await self._round()
            except Exception:
                log.exception("a bug of the client: it may not notice what changes in the fleet")
            if rounds % PRUNE_ROUNDS == 0:
                self._peers.prune()

    async def _round(self) -> None:
        """Learns what has come up since: the preferred node, the index, other nodes; probes those in trouble."""
        local = self._peers.local
        if local.control.welcome is None and local.breaker.closed:
            with contextlib.suppress(*TROUBLE):  # counted by its breaker
                await local.hello()
        for peer in self._peers.all():
            peer.probe_if_due()
        await self._directory.refresh()

    def _check(self, namespace: Namespace) -> None:
        if namespace not in self._manifests:
            raise BadRequest(f"namespace {namespace.hex()[:16]} is not open here: call open(manifest) first")
