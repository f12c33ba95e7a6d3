"""Writers: reserve, commit, abort, and the end of reservations."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from kvstore.core import BadRequest, Event, Key, MissReason, limits
from kvstore.store.clients import Client, Clients
from kvstore.store.deadlines import Deadlines
from kvstore.store.leases import Leases
from kvstore.store.listing import Listing
from kvstore.store.namespaces import OpenNamespace
from kvstore.store.objects import Object, Reservation
from kvstore.store.steps import Steps
from kvstore.wire import (
    Busy,
    CommitAnswer,
    CommitItem,
    Committed,
    Exists,
    Generation,
    Granted,
    Refused,
    ReserveAnswer,
    ReserveItem,
    Stale,
)


class Asking(NamedTuple):
    """Who asks, for what namespace, and when."""

    client: Client
    namespace: OpenNamespace
    now_s: float


class Asked(NamedTuple):
    """What the items of a slice of a Reserve have in common."""

    client: Client
    namespace: OpenNamespace
    now_s: float
    end_s: float  # of the reservations
    alone: bool
    doubtful_pages: int  # see `Clients.doubtful_pages`
    spared: dict[Hashable, None]
    """Names in the policy of what the batch offers and continues: none of it is evicted while it is served."""


class Writing:
    """Reservations, and what becomes of them."""

    def __init__(
        self,
        listing: Listing,
        clients: Clients,
        leases: Leases,
        random_bytes: Callable[[int], bytes],
        hold_s: float,
        on_committed: Callable[[Object], None],
    ) -> None:
        self._on_committed = on_committed
        self._listing = listing
        self._clients = clients
        self._leases = leases
        self._random_bytes = random_bytes
        self._hold_s = hold_s
        self._deadlines: Deadlines[Reservation] = Deadlines()

    def __len__(self) -> int:
        return len(self._deadlines)

    def reserving(
        self, look_up: Callable[[], Asking], items: Sequence[ReserveItem], duration_s: float
    ) -> Steps[tuple[ReserveAnswer, ...]]:
        """Grants what there is room for. See `Store.reserving`. `look_up` is asked anew for each slice."""
        self._check(look_up().namespace, items)  # before anything has changed
        spared = _chain(items)
        answers: list[ReserveAnswer] = []
        try:
            for begin in range(0, len(items), limits.RESERVED_PER_SLICE):
                some = items[begin : begin + limits.RESERVED_PER_SLICE]
                if begin:
                    yield
                    self._check(look_up().namespace, some)  # a key may have come to another namespace
                answers += self._reserve_some(look_up(), some, duration_s, spared)
        finally:
            self._listing.nvme.unspare(spared)
            self._listing.dram.unspare(spared)
        return tuple(answers)

    def _check(self, namespace: OpenNamespace, items: Sequence[ReserveItem]) -> None:
        for item in items:
            namespace.pages_of(item.size_bytes)
            if item.depth < 0:
                raise BadRequest(f"a chunk's depth counts from 0, it cannot be {item.depth}")
            listed = self._listing.objects.get(item.key)
            if listed is not None and listed.namespace is not namespace:
                raise BadRequest(
                    f"the key {item.key.hex()[:16]} belongs to another namespace: keys cannot be shared"
                )

    def _reserve_some(
        self,
        asking: Asking,
        items: Sequence[ReserveItem],
        duration_s: float,
        spared: dict[Hashable, None],
    ) -> list[ReserveAnswer]:
        client, namespace, now_s = asking
        alone = not self._clients.others_active(client, now_s)
        end_s = now_s + min(duration_s, limits.RESERVATION_S_MAX)
        doubtful_pages = self._clients.doubtful_pages(besides=client)
        asked = Asked(client, namespace, now_s, end_s, alone, doubtful_pages, spared)
        self._listing.nvme.spared = spared
        try:
            return [self._reserve(asked, item) for item in items]
        finally:
            self._listing.nvme.spared = ()

    def _reserve(self, asked: Asked, item: ReserveItem) -> ReserveAnswer:
        listed = self._listing.find(asked.namespace.id, item.key)
        if (
            listed is not None
            and listed.reservation is not None
            and listed.reservation.deadline_s <= asked.now_s
        ):
            self._expire(listed.reservation, asked.now_s)
            listed = None
        if listed is None or listed.is_unreachable:
            return self._grant(asked, item)
        if listed.reservation is not None:
            return self._repeat(asked, item, listed.reservation)
        if not (listed.is_readable or listed.is_on_disk):  # it is being read from a device that went down
            self._listing.totals.busy += 1
            return Busy()
        return self._exists(asked, listed)

    def _grant(self, asked: Asked, item: ReserveItem) -> ReserveAnswer:
        client, namespace = asked.client, asked.namespace
        dram = self._listing.dram
        pages = namespace.pages_of(item.size_bytes)
        all_pages = dram.reserved_pages + dram.held_pages
        filling = Object(item.key, item.parent, item.depth, namespace, item.size_bytes)
        filling.cold = item.cold
        filling.writer = client.id
        filling.generation = Generation(self._random_bytes(limits.GENERATION_BYTES))
        filling.reservation = Reservation(client, asked.now_s, asked.end_s, filling)
        room = self._clients.may_write(
            client, pages, all_pages, asked.doubtful_pages, namespace.floor_pages, alone=asked.alone
        )
        if not room or not self._listing.add(filling, asked.spared, self._leases.young_s(asked.now_s)):
            self._listing.totals.refused += 1
            self._listing.watches.fire(item.key)
            return Refused(MissReason.NO_ROOM)
        client.num_reservations += 1
        client.reserved_pages += pages
        self._deadlines.add(filling.reservation)
        self._listing.totals.granted += 1
        return Granted(filling.generation, filling.in_dram.extents)

    def _repeat(self, asked: Asked, item: ReserveItem, reservation: Reservation) -> ReserveAnswer:
        """The same client gets the same grant again; the client counts from its last sending, so do we."""
        filling = reservation.object
        if reservation.client is not asked.client or filling.size_bytes != item.size_bytes:
            self._listing.totals.busy += 1
            return Busy()
        latest_s = reservation.started_s + limits.RESERVATION_S_MAX
        reservation.deadline_s = max(reservation.deadline_s, min(asked.end_s, latest_s))
        return Granted(filling.generation, filling.in_dram.extents)

    def _exists(self, asked: Asked, ready: Object) -> ReserveAnswer:
        """Exists is said only when an Acquire by this client would be promised now."""
        ready.used_by(asked.client.id)
        if not self._leases.may_take(asked.client, ready, asked.namespace.floor_pages, alone=asked.alone):
            self._listing.totals.refused += 1
            return Refused(MissReason.LEASE_LIMIT)
        self._listing.totals.exists += 1
        return Exists()

    def commit(
        self, client: Client, namespace: OpenNamespace, items: Sequence[CommitItem], now_s: float
    ) -> tuple[CommitAnswer, ...]:
        """Publishes what the client has filled. See `Store.commit`."""
        for item in items:
            listed = self._listing.find(namespace.id, item.key)
            if listed is not None and not namespace.kinds.geometry_of(listed.size_bytes, len(item.table)):
                raise BadRequest(
                    f"no object of this namespace has {listed.size_bytes} bytes and a table of "
                    f"{len(item.table)} ({limits.CHECKSUM_BYTES} for each run)"
                )
        return tuple(self._commit(client, namespace, item, now_s) for item in items)

    def _commit(
        self, client: Client, namespace: OpenNamespace, item: CommitItem, now_s: float
    ) -> CommitAnswer:
        listed = self._listing.find(namespace.id, item.key)
        if listed is None or listed.generation != item.generation:
            return self._stale()
        reservation = listed.reservation
        if reservation is None:  # a repeated commit: it is ready, by this very reservation
            return Committed()
        if reservation.client is not client:
            return self._stale()
        if reservation.deadline_s <= now_s:
            self._expire(reservation, now_s)
            return self._stale()
        self._end(reservation)
        client.has_committed = True
        listed.ready_s = now_s
        self._listing.totals.committed += 1
        self._listing.publish(listed, item.table)
        self._on_committed(listed)
        return Committed()

    def _stale(self) -> CommitAnswer:
        self._listing.totals.stale += 1
        return Stale()

    def abort(
        self,
        client: Client,
        namespace: OpenNamespace,
        items: Sequence[tuple[Key, Generation]],
        now_s: float,
        *,
        quiet: bool,
    ) -> None:
        """Gives reservations back. See `Store.abort`."""
        for key, generation in items:
            listed = self._listing.find(namespace.id, key)
            if listed is None or listed.generation != generation or listed.reservation is None:
                continue
            if listed.reservation.client is not client:
                continue
            self._end(listed.reservation)
            self._listing.totals.aborted += 1
            if quiet:
                self._listing.give_up(listed, Event.ABORT)
            else:
                self._listing.give_up_held(listed, Event.ABORT, client, now_s + self._hold_s)

    def expire(self, now_s: float) -> None:
        """Ends reservations that are over, a slice at a time."""
        for _ in range(limits.EXPIRIES_PER_TICK_MAX):
            reservation = self._deadlines.due(now_s)
            if reservation is None:
                return
            self._expire(reservation, now_s)

    def _expire(self, reservation: Reservation, now_s: float) -> None:
        """The writer may still be writing: its pages are held."""
        self._end(reservation)
        self._listing.totals.expired_reservations += 1
        filling = reservation.object
        self._listing.lost.set(filling.key, MissReason.EXPIRED)
        self._listing.give_up_held(filling, Event.EXPIRE, reservation.client, now_s + self._hold_s)

    def _end(self, reservation: Reservation) -> None:
        self._deadlines.discard(reservation)
        reservation.object.reservation = None
        reservation.client.num_reservations -= 1
        reservation.client.reserved_pages -= reservation.object.pages

    def audit(self) -> None:
        """Asserts that clients agree with the reservations there are."""
        reservations = [
            listed.reservation for listed in self._listing.objects.values() if listed.reservation is not None
        ]
        assert len(reservations) == len(self._deadlines), "a reservation has no deadline"
        for client in self._clients:
            own = [reservation for reservation in reservations if reservation.client is client]
            pages = sum(reservation.object.pages for reservation in own)
            assert len(own) == client.num_reservations, "a client's reservations are miscounted"
            assert pages == client.reserved_pages, "a client's reserved pages are miscounted"
        held_pages = sum(client.held_pages for client in self._clients)
        assert held_pages == self._listing.dram.held_pages, "held pages belong to nobody"


def _chain(items: Sequence[ReserveItem]) -> dict[Hashable, None]:
    """The entries of these items and of their parents; the last first, so that parents are used after children."""
    entries: dict[Hashable, None] = {}
    for item in reversed(items):
        entries[item.depth, item.key] = None
        entries[item.depth - 1, item.parent] = None
    return entries
