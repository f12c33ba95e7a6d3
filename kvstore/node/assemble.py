"""Composition: the only file that knows all rooms.

    ControlServer -> Store -> Arena <- MooncakeTransfer (registers it), ArenaSocket (hands it out)
                     Porter -> Arena, NvmeTier
    Heart -> Store.tick, views for AdminServer
    Publisher -> Index: the Redis of the fleet, or an embedded one

What is started here is ended here, in reverse order, also when a later step fails.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvstore import __version__
from kvstore.admin import AdminServer, Identity, ObjectsPage, View
from kvstore.core import KVStoreError, TransferFailed, limits
from kvstore.index import NodeRecord, Publisher, RedisIndex
from kvstore.node.banner import banner, warnings_of
from kvstore.node.checks import is_loopback, read_token
from kvstore.node.clock import LoopClock
from kvstore.node.devices import make_tier
from kvstore.node.embedded_redis import EmbeddedRedis
from kvstore.node.garbage import without_collections
from kvstore.node.heart import Heart
from kvstore.node.index_checks import refuse_wrong_redis
from kvstore.node.manifests import Manifests
from kvstore.node.metered import MeteredStore
from kvstore.node.ports import claimable
from kvstore.node.quiet import MOONCAKE_NOISE, without_noise
from kvstore.node.scrubbing import keep_scrubbing
from kvstore.node.sections import Config
from kvstore.node.settings import join_address, split_address, without_password
from kvstore.node.sharing import share_arena
from kvstore.policy import PrefixLru
from kvstore.server import ControlServer
from kvstore.store import Mover, Porter, ReportLog, SpillMode, Tiering
from kvstore.tiers import Arena, NvmeDevice
from kvstore.transfer import ArenaSocket, MooncakeTransfer, own_port_window
from kvstore.wire import BootId, NodeId, Welcome


@dataclass(frozen=True)
class Node:
    """A node that serves. `background` is what must run until it stops, by name; `ready` tells probes,
    `published` returns when the index knows what the node found at its start, or cannot be told."""

    banner: str
    background: dict[str, Coroutine[Any, Any, None]]
    ready: Callable[[bool], None]
    published: Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def assemble(config: Config) -> AsyncIterator[Node]:
    """Starts everything; ends everything.

    Raises:
        KVStoreError: something cannot be had; one line with cause and remedy.
    """
    async with AsyncExitStack() as stack:
        yield await _Assembly(config, stack).node()


class _Assembly:
    """The steps of a start, in order. Each puts its own end onto the stack."""

    def __init__(self, config: Config, stack: AsyncExitStack) -> None:
        self._config = config
        self._stack = stack
        self._token = read_token(config.auth)
        self._control_listen = claimable(config.control.listen, "--control-listen")
        self._admin_listen = split_address(claimable(config.admin.listen, "--admin-listen"))
        self._boot = BootId(secrets.token_bytes(limits.BOOT_ID_BYTES))
        self._node = node_id(config.node.id)
        self._clock = LoopClock()

    async def node(self) -> Node:
        """A node that serves."""
        self._embedded = await self._start_redis()
        self._index_url = self._embedded.url if self._embedded else self._config.redis.url
        index = RedisIndex.connect(self._index_url, self._config.redis.timeout_s)
        self._stack.push_async_callback(index.close)
        await refuse_wrong_redis(index, self._index_url)
        self._arena = await self._map_arena()
        await own_port_window()
        self._transfer = self._register_arena()
        self._shared = self._share_arena()
        self._nvme = make_tier(self._config, self._on_found)
        manifests = Manifests(index)
        self._store = MeteredStore(
            self._arena.page_count,
            self._arena.page_bytes,
            PrefixLru(),
            self._clock,
            manifests.remember,
            self._config.transfer.hold_s,
            tiering=self._tiering(),
        )
        self._porter = Porter(
            self._store,
            self._arena,
            self._nvme,
            self._config.tiers.promote_deadline_s,
            self._store.carried,
        )
        await self._mount_devices()
        self._publisher = Publisher(
            index, self._node, self._store.tier_of, self._store.keys, record=self._record
        )
        self._store.on_dirty = self._publisher.mark
        self._control = await self._start_control()
        self._heart = Heart(self._store.tick, self._publish_view)
        self._admin, admin_address = self._start_admin()
        background = {
            "heart": self._heart.run(),
            "publisher": self._publisher.run(),
            "manifests": manifests.run(),
        }
        if self._embedded:
            background["redis"] = self._embedded.keep()
        if rate := self._config.tiers.scrub_bytes_per_s:
            background["scrub"] = keep_scrubbing(self._nvme, rate, self._store.damaged)
        return Node(self._banner(admin_address), background, self._admin.ready, self._publisher.first_pass)

    async def _start_redis(self) -> EmbeddedRedis | None:
        if self._config.redis.url:
            return None
        embedded = await asyncio.to_thread(EmbeddedRedis.start)
        self._stack.callback(embedded.stop)
        return embedded

    async def _map_arena(self) -> Arena:
        dram = self._config.dram
        arena = await asyncio.to_thread(
            Arena.create, dram.size_bytes, dram.page_bytes, huge_pages=dram.huge_pages, lock=dram.lock
        )
        self._stack.callback(arena.close)
        return arena

    def _register_arena(self) -> MooncakeTransfer:
        settings = self._config.transfer
        try:
            with without_noise(MOONCAKE_NOISE):
                transfer = MooncakeTransfer(settings.host, settings.protocol, settings.devices)
        except TransferFailed as error:
            raise KVStoreError(
                f"Mooncake ({settings.protocol}, {settings.host}) cannot be used: {error}"
            ) from error
        self._stack.callback(transfer.close)
        transfer.register(self._arena.address, self._arena.size_bytes)
        self._stack.callback(transfer.unregister, self._arena.address)
        return transfer

    def _share_arena(self) -> ArenaSocket | None:
        shared = share_arena(self._config.transfer, self._arena, self._boot, self._token)
        if shared:
            self._stack.callback(shared.close)
        return shared

    def _tiering(self) -> Tiering | None:
        tiers = self._config.tiers
        if not self._nvme.devices:
            return None
        return Tiering(self._nvme, SpillMode(tiers.spill), tiers.promote_deadline_s)

    async def _mount_devices(self) -> None:
        """What is on them is listed when this returns, but for devices that do not answer yet."""
        self._stack.push_async_callback(self._stop_devices)
        with without_collections():
            await self._nvme.start()
            await self._porter.settled()

    def _on_found(self, device: NvmeDevice) -> None:
        self._porter.found(device)

    async def _stop_devices(self) -> None:
        await self._porter.stop(self._config.tiers.flush_s)

    async def _start_control(self) -> ControlServer:
        mover = Mover(self._store, self._arena)
        self._stack.callback(mover.close)
        control = ControlServer(
            self._store,
            mover,
            self._welcome,
            boot=self._boot,
            listen=self._control_listen,
            token=self._token,
            clock=self._clock,
        )
        await control.start()
        self._stack.push_async_callback(control.stop)
        return control

    def _start_admin(self) -> tuple[AdminServer, str]:
        admin = AdminServer(self._admin_listen, self._token, self._view(), self._objects, self._reports)
        address = join_address(*admin.start())
        # In a thread: a listing under way still wants an answer of this loop.
        self._stack.push_async_callback(asyncio.to_thread, admin.stop)
        return admin, address

    # --- what the rooms ask for ---------------------------------------------------------------------

    def _advertised(self) -> str:
        return join_address(self._config.node.advertise, split_address(self._control.address)[1])

    def _welcome(self) -> Welcome:
        # The embedded Redis can only be reached from this host, and has nothing to say about other nodes.
        reachable = not self._embedded or is_loopback(self._config.node.advertise)
        return Welcome(
            node=self._node,
            versions=(),
            page_bytes=self._arena.page_bytes,
            arena_base=self._arena.address,
            arena_bytes=self._arena.size_bytes,
            transfer={self._transfer.protocol: self._transfer.segment},
            memfd_socket=self._shm_path(),
            index_url=self._index_url if reachable else "",
        )

    def _shm_path(self) -> str:
        return str(self._shared.path) if self._shared else ""

    def _record(self) -> NodeRecord:
        use = self._store.snapshot().tiers
        return NodeRecord(
            node=self._node,
            boot=self._boot,
            control=self._advertised(),
            free_bytes=sum(tier.free_pages * tier.page_bytes for tier in use.values()),
            arena_bytes=self._arena.size_bytes,
        )

    async def _objects(self, limit: int, cursor: int) -> ObjectsPage:
        objects, following = self._store.objects(limit, cursor)
        return ObjectsPage(objects=objects, cursor=following)

    async def _reports(self) -> ReportLog:
        return self._store.reports()

    def _publish_view(self) -> None:
        self._admin.publish(self._view())

    def _view(self) -> View:
        return View(
            at_s=monotonic(),
            uptime_s=self._clock(),
            slept_s=self._clock.skipped_s,
            identity=Identity(
                version=__version__,
                node=self._config.node.id,
                boot=self._boot.hex(),
                control=self._advertised(),
                mooncake=self._transfer.segment,
                index=without_password(self._index_url),
            ),
            store=self._store.snapshot(),
            refused=dict(self._store.refused),
            pushed=self._store.pushes.freeze(),
            pulled=self._store.pulls.freeze(),
            server=self._control.stats,
            publisher=self._publisher.stats,
            redis_restarts=self._embedded.restarts if self._embedded else 0,
            loop_lag_s=self._heart.lag.freeze(),
            spilled=self._store.spills.freeze(),
            promoted=self._store.promotions.freeze(),
            devices=tuple(device.stats() for device in self._nvme.devices),
        )

    def _banner(self, admin_address: str) -> str:
        return banner(
            self._config,
            control=self._control.address,
            admin=admin_address,
            mooncake=self._transfer.segment,
            shm=self._shm_path(),
            embedded_redis=without_password(self._embedded.url) if self._embedded else "",
            devices=[device.stats() for device in self._nvme.devices],
            warnings=warnings_of(self._config, self._arena.warnings),
        )


def node_id(name: str) -> NodeId:
    """The id of a node with this name: the same after every start."""
    return NodeId(hashlib.blake2b(name.encode(), digest_size=limits.NODE_ID_BYTES).digest())
