"""The nodes a client talks to: one connection and one breaker each, found by address or by node id."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping

from kvstore.client.address import NodeAddress, is_address
from kvstore.client.breaker import Breaker, BreakerOpen
from kvstore.client.config import ClientConfig
from kvstore.client.control import REFUSALS, TROUBLE, Answer, ControlClient, Undo
from kvstore.core import KVStoreError, Namespace, PeerLost
from kvstore.index import NodeRecord
from kvstore.wire import NodeId, RequestBody, Welcome

log = logging.getLogger(__name__)


class Peer:
    """One node: asked while its breaker is closed, probed in the background while it is not."""

    def __init__(
        self, control: ControlClient, breaker: Breaker, timeout_s: float, tasks: "set[asyncio.Task[None]]"
    ) -> None:
        self.control = control
        self.breaker = breaker
        self.idle = True  # not asked since the last `Peers.prune`
        self._timeout_s = timeout_s
        self._tasks = tasks
        self._last_refusal = ""

    def __repr__(self) -> str:
        return f"<Peer {self.control.control} {self.breaker.state}>"

    @property
    def node(self) -> NodeId | None:
        """Its id, once it has answered."""
        return None if self.control.address is None else self.control.address.node

    async def ask(
        self,
        body: RequestBody,
        *,
        namespace: Namespace | None = None,
        wait_s: float = 0.0,
        undo: Undo | None = None,
    ) -> Answer:
        """As `ControlClient.ask`; `wait_s` is what the node was asked to wait, on top of the time-out.

        Raises:
            BreakerOpen: at once, while the node is in trouble. Else as `ControlClient.ask`.
        """
        self.idle = False
        if not self.breaker.closed:
            self.probe_if_due()
            raise BreakerOpen(f"node {self.control.control} did not answer lately and is not asked yet")
        try:
            answer = await self.control.ask(body, self._timeout_s + wait_s, namespace=namespace, undo=undo)
        except REFUSALS as error:
            self._refused(error)
            raise
        except PeerLost:
            self.breaker.failure()
            raise
        self.breaker.success()
        return answer

    async def hello(self) -> Welcome:
        """Asks for the node's facts, whatever its breaker says; the outcome counts."""
        try:
            welcome = await self.control.hello(self._timeout_s)
        except REFUSALS as error:
            self._refused(error)
            raise
        except PeerLost:
            self.breaker.failure()
            raise
        self.breaker.success()
        return welcome

    def post(self, body: RequestBody) -> None:
        """Sends best effort, unless the node is in trouble: durations are the backstop."""
        if self.breaker.closed:
            self.control.post(body)

    def probe_if_due(self) -> None:
        """Asks a node in trouble, in the background, whether it is back."""
        if self.breaker.begin_probe():
            task = asyncio.get_running_loop().create_task(self._probe())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refused(self, error: KVStoreError) -> None:
        """A refusal is an answer: the node lives. Said once, since callers go on without the node."""
        self.breaker.success()
        if str(error) != self._last_refusal:
            self._last_refusal = str(error)
            log.warning("%s", error)

    async def _probe(self) -> None:
        try:
            await self.hello()
        except TROUBLE:
            return  # counted by the breaker; the next real call hears what is wrong


class Peers:
    """All nodes that this client knows or has been told of.

    Args:
        config: the preferred node is asked first, and kept for ever.
        manifests: see `ControlClient`.
        clock: for the breakers.
        rng: for the breakers.

    Raises:
        BadConfiguration: the preferred node's address is none.
    """

    def __init__(
        self,
        config: ClientConfig,
        manifests: Mapping[Namespace, bytes],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._config = config
        self._manifests = manifests
        self._clock = clock
        self._rng = rng
        self._probes: set[asyncio.Task[None]] = set()
        self._peers: dict[str, Peer] = {}
        self._alive: Mapping[NodeId, NodeRecord] = {}
        self._odd: set[str] = set()  # addresses already complained about
        self.local = self.at(config.node)

    def at(self, control: str) -> Peer:
        """The node at this control endpoint."""
        peer = self._peers.get(control)
        if peer is None:
            link = ControlClient(control, self._config.client, self._config.token, manifests=self._manifests)
            breaker = Breaker(
                self._clock,
                self._rng,
                failures_max=self._config.breaker_failures,
                probe_s=self._config.probe_s,
                probe_s_max=self._config.probe_s_max,
            )
            peer = Peer(link, breaker, self._config.request_timeout_s, self._probes)
            self._peers[control] = peer
        return peer

    def members(self, alive: Mapping[NodeId, NodeRecord]) -> None:
        """Takes note of the nodes that the index says are alive, as far as what it says can be."""
        self._alive = {node: record for node, record in alive.items() if self._is_address(record.control)}

    def _is_address(self, control: str) -> bool:
        if is_address(control):
            return True
        if control not in self._odd:
            self._odd.add(control)
            log.warning(
                "a node in the index gives its address as %r: left out; see its node.advertise", control
            )
        return False

    def named(self, node: NodeId) -> Peer | None:
        """The node with this id, if it is the preferred one or alive."""
        if node == self.local.node:
            return self.local
        record = self._alive.get(node)
        return None if record is None else self.at(record.control)

    def reach(self, whom: NodeAddress | NodeId) -> Peer | None:
        """The node of a hand-off. Its id leads to it before its address does: "127.0.0.1" means another
        node on another host."""
        if isinstance(whom, NodeAddress):
            return self.named(whom.node) or self.at(whom.control)
        return self.named(whom)

    def others(self) -> list[Peer]:
        """The alive nodes apart from the preferred one, those with most free bytes first."""
        records = sorted(self._alive.values(), key=lambda record: record.free_bytes, reverse=True)
        peers = [self.named(record.node) for record in records]
        return [peer for peer in peers if peer is not None and peer is not self.local and peer.breaker.closed]

    def all(self) -> Iterable[Peer]:
        """Every node with a connection."""
        return list(self._peers.values())

    def prune(self) -> None:
        """Gives up connections to nodes that are not alive and were not asked since the last call."""
        alive = {record.control for record in self._alive.values()} | {self._config.node}
        for control, peer in list(self._peers.items()):
            if control not in alive and peer.idle:
                peer.control.close()
                del self._peers[control]
            peer.idle = True

    async def close(self) -> None:
        """Ends probes and connections."""
        for probe in self._probes:
            probe.cancel()
        if self._probes:
            await asyncio.wait(list(self._probes))
        for peer in self._peers.values():
            peer.control.close()
        await asyncio.sleep(
            0
        )  # connections end in the loop's next turn; the last releases are with the kernel
