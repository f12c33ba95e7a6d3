"""Clients and their shares of the arena.

A client is known by what it holds and by when it last spoke; there are no sessions. The rule for leased
pages and for reserved + held pages is the same, with another share of the arena each:

* a client may always hold `OBJECTS_PER_CLIENT_MIN` objects of its namespace;
* beyond that it stays within the share, and within half of it while other clients are active;
* beyond that all clients together stay within the share.

A process that crashes and starts again is another client each time, and what its lives had reserved is held for
minutes. So among others there is one bound more: clients that never committed anything may together have
half of the writers' share, and what they always may have counts within that half against those that did
commit. A pusher in a crash loop starves its own kind, not those that work.
"""

from collections import OrderedDict
from collections.abc import Iterator

from kvstore.core import Overloaded, limits
from kvstore.wire import ClientId


class Client:
    """What one client holds."""

    __slots__ = (
        "has_committed",
        "held_pages",
        "id",
        "leased",
        "leased_pages",
        "num_leases",
        "num_reservations",
        "promoted_pages",
        "reserved_pages",
        "seen_s",
    )

    def __init__(self, client: ClientId) -> None:
        self.id = client
        self.seen_s = 0.0
        self.has_committed = False
        self.num_leases = 0
        self.num_reservations = 0
        self.reserved_pages = 0
        self.held_pages = 0
        self.leased: dict[object, int] = {}  # object -> this client's leases that have it
        self.leased_pages = 0  # in DRAM, of those objects, each counted once
        self.promoted_pages = 0  # of those that were promoted for it

    @property
    def written_pages(self) -> int:
        """Pages that are out of use for its writing: reserved or held."""
        return self.reserved_pages + self.held_pages

    @property
    def idle(self) -> bool:
        """Whether it can be forgotten without losing account of anything."""
        return not (self.num_leases or self.num_reservations or self.held_pages)


class Clients:
    """The clients of a node, by when they last spoke; at most `CLIENTS_MAX`."""

    def __init__(self, page_count: int) -> None:
        self._clients: OrderedDict[ClientId, Client] = OrderedDict()
        self.leased_pages_max = int(page_count * limits.LEASED_SHARE_MAX)
        self.promoted_pages_max = int(page_count * limits.LEASED_AND_PROMOTED_SHARE_MAX)
        self.reserved_pages_max = int(page_count * limits.RESERVED_AND_HELD_SHARE_MAX)

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def spoke(self, client: ClientId, now_s: float) -> Client:
        """The record of a client that makes a request now.

        Raises:
            Overloaded: too many clients hold something.
        """
        record = self._clients.get(client)
        if record is None:
            self._make_room()
            record = self._clients[client] = Client(client)
        record.seen_s = now_s
        self._clients.move_to_end(client)
        return record

    def others_active(self, client: Client, now_s: float) -> bool:
        """Whether anybody else spoke lately."""
        other = next((each for each in reversed(self._clients.values()) if each is not client), None)
        return other is not None and other.seen_s > now_s - limits.CLIENT_ACTIVE_S

    def doubtful_pages(self, besides: Client) -> int:
        """Pages that others than this client, which never committed anything, have reserved or held."""
        return sum(c.written_pages for c in self if not c.has_committed and c is not besides)

    def may_write(
        self,
        client: Client,
        pages: int,
        all_pages: int,
        doubtful_pages: int,
        floor_pages: int,
        *,
        alone: bool,
    ) -> bool:
        """Whether the client may reserve `pages` more, when `all_pages` are reserved or held by anybody."""
        wanted_pages = client.written_pages + pages
        share_pages = self.reserved_pages_max
        half_pages = int(share_pages * limits.CLIENT_SHARE_WITH_OTHERS)
        if client.has_committed:
            all_pages -= max(0, doubtful_pages - half_pages)
        elif not alone and wanted_pages > floor_pages and doubtful_pages + wanted_pages > half_pages:
            return False
        return within_share(wanted_pages, all_pages + pages, share_pages, floor_pages, alone=alone)

    def _make_room(self) -> None:
        if len(self._clients) < limits.CLIENTS_MAX:
            return
        idle = next((record.id for record in self._clients.values() if record.idle), None)
        if idle is None:
            raise Overloaded(
                f"{limits.CLIENTS_MAX} clients hold leases or reservations on this node, more are not served: "
                "try again when some have ended (120 s at most), or add nodes"
            )
        del self._clients[idle]


def within_share(
    client_pages: int, all_pages: int, share_pages: int, floor_pages: int, *, alone: bool
) -> bool:
    """Whether a client may hold `client_pages` when all hold `all_pages`, both counted with what it asks for."""
    if client_pages <= floor_pages:
        return True
    client_max = share_pages if alone else int(share_pages * limits.CLIENT_SHARE_WITH_OTHERS)
    return client_pages <= client_max and all_pages <= share_pages
