"""A blocking facade for tools, benchmarks and first steps: put and get objects without knowing the protocol.

The async client runs on a thread of its own; bytes move in the caller's thread. Arrays in memory that was
given to `register` move without a copy on this side, others through staging.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.client.address import NodeAddress
from kvstore.client.arrivals import Arrivals
from kvstore.client.client import Client
from kvstore.client.config import ClientConfig
from kvstore.client.loop_thread import LoopThread
from kvstore.client.mover import Mover, PullItem, PushItem, PushResult
from kvstore.client.opening import open_transfer
from kvstore.client.promise import Copy, Grant, Promise
from kvstore.client.staging import Staging
from kvstore.core import (
    BadRequest,
    Extent,
    Extents,
    Key,
    Manifest,
    MissReason,
    Namespace,
    PeerLost,
    TransferFailed,
    decode_manifest,
    limits,
    table_bytes_of,
)
from kvstore.index import Index
from kvstore.transfer import Transfer
from kvstore.wire import Committed, Exists, ReserveItem, Resident, WireExtents

log = logging.getLogger(__name__)

Array = NDArray[Any]
STAGING_BYTES = 64 * limits.MIB
REQUEST_S = 5.0  # a tool has more patience with a busy node than an engine
MARGIN_S = 1.0  # between the last byte and the end of the lease or reservation
WAIT_S = 1.0  # for copies from NVMe, before it is looked again whether there is any more to come
QUIET_S = 15.0  # Mooncake gives a transfer up that has not moved for 10


class Put(NamedTuple):
    """One object to be stored. `parent` is the key before it in its chain, None for the first."""

    key: Key
    array: Array
    parent: Key | None = None
    depth: int = 0
    cold: bool = False


class KVStore:
    """Puts and gets objects; every call blocks for at most `timeout_s` plus the client's own time-outs.

    Args:
        node: control endpoint of a node, "host:port".
        token: the fleet's shared secret, where the node asks for one.
        index_url: Redis; empty: what the node says.
        timeout_s: for moving the bytes of one call.
        transfer: how bytes move: "auto", "mooncake" (over TCP) or "shm", see `open_transfer`; or a transfer, which
            stays the caller's.
        index: an index to use instead of Redis; it stays the caller's.
        staging_bytes: memory for arrays that are not registered; the largest object must fit.

    Raises:
        PeerLost: on entering, no node answers there.
    """

    def __init__(
        self,
        node: str = "127.0.0.1:7400",
        *,
        token: bytes = b"",
        index_url: str = "",
        timeout_s: float = 30.0,
        transfer: Transfer | str = "auto",
        index: Index | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self._given_transfer = transfer
        self._token = token
        self._staging_bytes = staging_bytes
        self._manifests: dict[Namespace, Manifest] = {}
        self._registered: dict[int, Array] = {}
        self._releases: set[Future[None]] = set()  # leases that are being given back
        config = ClientConfig(node=node, index_url=index_url, token=token, request_timeout_s=REQUEST_S)
        self._client = Client(config, index=index)

    def __enter__(self) -> Self:
        self._loop = LoopThread("kvstore-client")
        try:
            self._loop.run(self._client.start())
            if self._client.welcome is None:
                raise PeerLost(
                    f"no node answers at {self._node}: start one with `kvstore serve`, or name another"
                )
            given = self._given_transfer
            self._transfer = (
                open_transfer(given, self._node, token=self._token) if isinstance(given, str) else given
            )
            self._staging = Staging(self._transfer, self._staging_bytes)
            self._mover = Mover(self._transfer, self._staging)
            if self._client.address is not None:
                self._mover.meet(self._client.address)
        except BaseException:
            self._loop.run(self._client.close())
            self._loop.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.settled(self._timeout_s)
        for address in list(self._registered):
            self._transfer.unregister(address)
        self._registered.clear()
        self._staging.close()
        if isinstance(self._given_transfer, str):
            self._transfer.close()
        wait(self._releases, REQUEST_S)
        self._loop.run(self._client.close())
        self._loop.stop()

    def open(self, manifest: Manifest) -> Namespace:
        """Opens the namespace of objects of this shape.

        Raises:
            BadRequest, NotAuthorised: the node refuses it.
        """
        namespace = self._loop.run(self._client.open(manifest))
        self._manifests[namespace] = manifest
        return namespace

    def register(self, array: Array) -> None:
        """Lets bytes move straight from and to this contiguous array, and to slices of it, from now on."""
        assert array.flags.c_contiguous, "only contiguous memory can be registered"
        self._transfer.register(array.ctypes.data, array.nbytes)
        self._registered[array.ctypes.data] = array

    def put(
        self, namespace: Namespace, key: Key, array: Array, *, parent: Key | None = None, depth: int = 0
    ) -> bool:
        """Stores one object. True: it can be had now, by whomever it was written."""
        return self.put_many(namespace, [Put(key, array, parent, depth)])[0]

    def put_many(self, namespace: Namespace, puts: Sequence[Put]) -> list[bool]:
        """Stores objects; for each, whether it can be had now. False: no room, or another writer is at it.

        Raises:
            BadRequest: the namespace is not open, or no object of it has an array's size.
        """
        geometry = self._manifest(namespace).geometry
        for put in puts:
            if geometry.units_of(put.array.nbytes) is None:
                raise BadRequest(
                    f"no object of this namespace has {put.array.nbytes} bytes: sizes are multiples of "
                    f"{geometry.bytes_per_unit}"
                )
        root = Key(namespace)
        items = [
            ReserveItem(put.key, put.parent or root, put.depth, put.array.nbytes, put.cold) for put in puts
        ]
        reserved = self._loop.run(self._client.reserve(namespace, items, self._timeout_s + MARGIN_S))
        grants = reserved.grants
        there = [isinstance(grant.answer, Exists) for grant in grants]
        written: list[int] = []
        tables: list[bytes] = []
        for address, indices in _by_node(grants):
            pushed = [self._push_item(namespace, grants[index], puts[index].array) for index in indices]
            results = self._mover.push(address, pushed, _left_s(reserved.expires_at))
            self._give_back(namespace, [grants[index] for index in indices], results)
            for index, result in zip(indices, results, strict=True):
                if result.ok and result.checksums is not None:
                    written.append(index)
                    tables.append(result.checksums)
        committed = [(grants[index], table) for index, table in zip(written, tables, strict=True)]
        for index, answer in zip(
            written, self._loop.run(self._client.commit(namespace, committed)), strict=True
        ):
            there[index] = isinstance(answer, Committed)
        return there

    def get(self, namespace: Namespace, key: Key, out: Array | None = None) -> Array | None:
        """One object's bytes, verified: `out`, or else a new array of uint8. None: it is not to be had."""
        return self.get_many(namespace, [key], None if out is None else [out])[0]

    def get_many(
        self, namespace: Namespace, keys: Sequence[Key], out: Sequence[Array] | None = None
    ) -> list[Array | None]:
        """The longest prefix of a chain that is to be had, each object verified; None for the rest.

        Args:
            namespace: of the keys.
            keys: a chain, in order.
            out: where to put the objects; what is in an array whose result is None is undefined.

        Raises:
            BadRequest: the namespace is not open, or an array of `out` has not its object's size.
            TransferFailed: bytes may still arrive in registered memory of `out`.
        """
        arrays: list[Array | None] = []
        end = time.monotonic() + self._timeout_s
        while (left := keys[len(arrays) :]) and (left_s := end - time.monotonic()) > 0:
            promise = self._loop.run(self._client.acquire(namespace, left, left_s + MARGIN_S))
            targets = None if out is None else out[len(arrays) :]
            arrays += (some := self._got(promise, targets))
            if promise.reason is not MissReason.LEASE_LIMIT or not some or any(one is None for one in some):
                break  # else there is more than one client may lease at a time
        return arrays + [None] * (len(keys) - len(arrays))

    def _got(self, promise: Promise, out: Sequence[Array] | None) -> list[Array | None]:
        """The objects of a promise, which is given back."""
        arrays: list[Array | None] = [None] * len(promise)
        try:
            for came in self._as_they_come(promise):
                for address, copies in _residents(came):
                    self._pull(promise.namespace, address, copies, arrays, out, _left_s(promise.expires_at))
        finally:
            self._release(promise)
        return arrays

    def _release(self, promise: Promise) -> None:
        """Gives a promise back. Nobody waits for the answer: what this client asks next is answered after it."""
        release = self._loop.submit(self._client.release(promise))
        self._releases.add(release)
        release.add_done_callback(self._released)

    def _released(self, release: "Future[None]") -> None:
        self._releases.discard(release)
        if not release.cancelled() and (error := release.exception()) is not None:
            log.error("a lease was not given back: a bug of the client", exc_info=error)

    def _as_they_come(self, promise: Promise) -> Iterator[dict[int, Copy]]:
        """The copies in DRAM, then those from NVMe as they come. What has been used makes room for them."""
        came = {n: copy for n, copy in enumerate(promise.copies) if isinstance(copy.answer, Resident)}
        if len(came) == len(promise):
            yield came
            return
        arrivals = Arrivals(self._loop, self._client, promise, _left_s(promise.expires_at))
        try:
            yield came
            while not arrivals.done:
                if came:
                    self._loop.run(self._client.release(promise, [copy.key for copy in came.values()]))
                came = {one.position: one.copy for one in arrivals.take(WAIT_S) if one.copy is not None}
                yield came
        finally:
            arrivals.close()

    def exists(self, namespace: Namespace, key: Key) -> bool:
        """Whether the object would be promised now."""
        promise = self._loop.run(self._client.acquire(namespace, [key], 1.0))
        self._release(promise)
        return len(promise) == 1

    def drop(self, namespace: Namespace, keys: Sequence[Key]) -> None:
        """Has every known node forget these objects; a leased copy goes when its lease ends."""
        self._loop.run(self._client.drop(namespace, keys))

    def manifest(self, namespace: Namespace) -> Manifest | None:
        """The manifest that the index remembers for a namespace."""
        data = self._loop.run(self._client.manifest(namespace))
        return None if data is None else decode_manifest(data)

    def _push_item(self, namespace: Namespace, grant: Grant, array: Array) -> PushItem:
        assert grant.granted is not None, "only what was granted is written"
        size_bytes = grant.item.size_bytes
        part = self._manifest(namespace).geometry.whole(size_bytes)
        source: int | Callable[[memoryview], None]
        source = array.ctypes.data if self._is_registered(array) else _filler(array)
        return PushItem(_extents(grant.granted.extents), size_bytes, part, source)

    def _give_back(
        self, namespace: Namespace, grants: Sequence[Grant], results: Sequence[PushResult]
    ) -> None:
        for quiet in (True, False):
            lost = [g for g, r in zip(grants, results, strict=True) if not r.ok and r.quiet is quiet]
            if lost:
                self._loop.run(self._client.abort(namespace, lost, quiet=quiet))

    def _pull(
        self,
        namespace: Namespace,
        address: NodeAddress,
        copies: Sequence[tuple[int, Copy, Resident]],
        arrays: list[Array | None],
        out: Sequence[Array] | None,
        left_s: float,
    ) -> None:
        """Pulls copies from one node and enters those that verified; asks the node to verify the others."""
        kinds = self._manifest(namespace).object_kinds
        targets = [
            np.empty(answer.size_bytes, np.uint8) if out is None else out[index]
            for index, _, answer in copies
        ]
        for (_, _, answer), target in zip(copies, targets, strict=True):
            if target.nbytes != answer.size_bytes:
                raise BadRequest(f"an object of {answer.size_bytes} bytes does not go into {target.nbytes}")
        items = [
            PullItem(
                _extents(answer.extents),
                answer.size_bytes,
                kinds.whole(answer.size_bytes, table_bytes_of(answer.table)),
                answer.table,
                target.ctypes.data if self._is_registered(target) else _sink(target),
            )
            for (_, _, answer), target in zip(copies, targets, strict=True)
        ]
        results = self._mover.pull(address, items, left_s)
        for (index, copy, _), target, result in zip(copies, targets, results, strict=True):
            if result.ok:
                arrays[index] = target
            elif result.corrupt:
                self._loop.run(self._client.suspect(namespace, copy))
        if not (all(result.quiet for result in results) or self._mover.settled(QUIET_S)):
            raise TransferFailed(
                f"node {address.control} did not answer in time, and bytes may still arrive in registered memory "
                "that they were wanted in: do not use it before this store is closed"
            )

    def _manifest(self, namespace: Namespace) -> Manifest:
        manifest = self._manifests.get(namespace)
        if manifest is None:
            raise BadRequest(f"namespace {namespace.hex()[:16]} is not open here: call open(manifest) first")
        return manifest

    def _is_registered(self, array: Array) -> bool:
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        return array.flags.c_contiguous and any(
            address <= start and end <= address + region.nbytes
            for address, region in self._registered.items()
        )


def _left_s(expires_at: float) -> float:
    """How long bytes may move for a lease or reservation: whatever comes later finds the pages of somebody else."""
    return max(0.0, expires_at - MARGIN_S - time.monotonic())


def _by_node(grants: Sequence[Grant]) -> list[tuple[NodeAddress, list[int]]]:
    """Indices of what may be written, by the node that granted it."""
    groups: dict[bytes, tuple[NodeAddress, list[int]]] = {}
    for index, grant in enumerate(grants):
        if grant.granted is not None and grant.address is not None:
            groups.setdefault(grant.address.boot, (grant.address, []))[1].append(index)
    return list(groups.values())


def _residents(copies: Mapping[int, Copy]) -> list[tuple[NodeAddress, list[tuple[int, Copy, Resident]]]]:
    """Those in DRAM, with their indices, by node."""
    groups: dict[bytes, tuple[NodeAddress, list[tuple[int, Copy, Resident]]]] = {}
    for index, copy in copies.items():
        if isinstance(copy.answer, Resident):
            _, some = groups.setdefault(copy.address.boot, (copy.address, []))
            some.append((index, copy, copy.answer))
    return list(groups.values())


def _extents(extents: WireExtents) -> Extents:
    return tuple(Extent(*extent) for extent in extents)


def _filler(array: Array) -> Callable[[memoryview], None]:
    def fill(view: memoryview) -> None:
        np.copyto(np.frombuffer(view, np.uint8), _bytes_of(np.ascontiguousarray(array)))

    return fill


def _sink(target: Array) -> Callable[[memoryview], None]:
    assert target.flags.c_contiguous, "objects are read into contiguous arrays"

    def sink(view: memoryview) -> None:
        np.copyto(_bytes_of(target), np.frombuffer(view, np.uint8))

    return sink


def _bytes_of(array: Array) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
