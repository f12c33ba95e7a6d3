"""What the tiers hold now, in numbers."""

from kvstore.core import Tier
from kvstore.store.leases import Leases
from kvstore.store.listing import Listing
from kvstore.store.nvme import Nvme
from kvstore.store.snapshot import TierUse


def tiers_in_use(listing: Listing, leases: Leases, page_bytes: int) -> dict[Tier, TierUse]:
    """Every tier that there is."""
    dram = listing.dram
    use = TierUse(
        objects=dram.ready_objects,
        object_bytes=dram.ready_bytes,
        page_bytes=page_bytes,
        pages=dram.page_count,
        free_pages=dram.free_pages,
        held_pages=dram.held_pages,
        reserved_pages=dram.reserved_pages,
        leased_pages=leases.leased_pages,
        moving_pages=dram.promoted_pages + dram.landing_pages,
    )
    nvme = listing.nvme
    return {Tier.DRAM: use, Tier.NVME: _on_disks(nvme, leases)} if nvme.disks.devices else {Tier.DRAM: use}


def _on_disks(nvme: Nvme, leases: Leases) -> TierUse:
    """Of the devices that are up. Devices may have pages of different sizes: counted in the smallest."""
    up = {disk: use for disk, use in nvme.use.items() if disk.up}
    page_bytes = min((disk.page_bytes for disk in up), default=1)
    free_bytes = sum(disk.free_pages * disk.page_bytes for disk in up)
    return TierUse(
        objects=sum(use.objects for use in up.values()),
        object_bytes=sum(use.object_bytes for use in up.values()),
        page_bytes=page_bytes,
        pages=nvme.size_bytes // page_bytes,
        free_pages=free_bytes // page_bytes,
        held_pages=0,
        reserved_pages=0,
        leased_pages=-(-leases.disk_bytes // page_bytes),
        moving_pages=-(-nvme.coming_bytes // page_bytes),
    )
