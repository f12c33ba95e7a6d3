"""What the store tells of itself: totals since the start, and what it holds now."""

import msgspec

from kvstore.core import MissReason, Tier


class Totals(msgspec.Struct):
    """Counted since the start of this boot; they only grow.

    `evicted` left the node; `demoted` left DRAM and are on NVMe, `trimmed` left NVMe and are in DRAM; `found` were on
    a device when it was mounted; `orphaning` were evicted although children of them are on NVMe.

    Keys are counted at the calls that ask for them. Tokens are counted from reports, once per engine
    request: only the engine knows what a request asked for and what it got.
    """

    granted: int = 0
    exists: int = 0
    busy: int = 0
    refused: int = 0
    committed: int = 0
    stale: int = 0
    aborted: int = 0
    expired_reservations: int = 0
    expired_leases: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    dropped: int = 0
    found: int = 0
    spilled: int = 0
    spilled_bytes: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    demoted: int = 0
    trimmed: int = 0
    orphaning: int = 0
    failed_spills: dict[str, int] = msgspec.field(default_factory=dict)
    failed_promotions: dict[MissReason, int] = msgspec.field(default_factory=dict)
    verified: int = 0
    bad_copies: int = 0
    acquired_keys: int = 0
    missed_keys: dict[MissReason, int] = msgspec.field(default_factory=dict)
    queried_tokens: int = 0
    promised_tokens: int = 0
    hit_tokens: int = 0
    missed_tokens: dict[MissReason, int] = msgspec.field(default_factory=dict)
    reports: int = 0

    def miss(self, reason: MissReason) -> None:
        """A key was asked for in vain."""
        self.missed_keys[reason] = self.missed_keys.get(reason, 0) + 1

    def copy(self) -> "Totals":
        """The totals as they are now."""
        return msgspec.structs.replace(
            self,
            missed_keys=dict(self.missed_keys),
            missed_tokens=dict(self.missed_tokens),
            failed_spills=dict(self.failed_spills),
            failed_promotions=dict(self.failed_promotions),
        )


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tier now. `objects` and `object_bytes` are what may be promised; pages are counted whatever is in them."""

    objects: int
    object_bytes: int
    page_bytes: int
    pages: int
    free_pages: int
    held_pages: int
    reserved_pages: int
    leased_pages: int
    moving_pages: int = 0  # being filled from another tier


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The store at one moment. Nobody changes it, so any thread may read it."""

    tiers: dict[Tier, TierUse]
    totals: Totals
    namespaces: int
    clients: int
    leases: int
    reservations: int
    watched_keys: int
    moving: int = 0  # copies on their way between tiers
    waiting: int = 0  # promotions that wait for room

    @property
    def hit_rate(self) -> float:
        """Tokens that engines pulled, of those they asked for; the one definition."""
        return self.totals.hit_tokens / self.totals.queried_tokens if self.totals.queried_tokens else 0.0


class ObjectView(msgspec.Struct, frozen=True, kw_only=True):
    """An object as administration shows it."""

    key: str
    namespace: str
    depth: int
    size_bytes: int
    tiers: dict[Tier, str]
    leases: int
    cold: bool
