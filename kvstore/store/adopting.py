"""What devices had on them when they were mounted becomes objects of the store.

Only objects of namespaces whose manifest is known can be verified, so only these are listed. The others are set aside
until an engine brings the manifest. Of two copies of a key one is enough: what the store knows already stays.
"""

from collections.abc import Iterable

from kvstore.core import BadRequest, Namespace, Overloaded
from kvstore.store.listing import Listing
from kvstore.store.namespaces import Namespaces, OpenNamespace
from kvstore.store.objects import Disk, Object, OnDevice
from kvstore.tiers import Record


class Adopting:
    """Lists what is on devices."""

    def __init__(self, namespaces: Namespaces, listing: Listing) -> None:
        self._namespaces = namespaces
        self._listing = listing

    def namespace_opened(self, namespace: Namespace, manifest: bytes) -> None:
        """A namespace is known, now or again: devices keep its manifest, and its objects may be had."""
        for disk in self._listing.nvme.disks.devices:
            disk.open_namespace(namespace, manifest)
        opened = self._namespaces.get(namespace)
        for placed in self._listing.nvme.take_out(namespace):
            self._list(placed, opened)

    def adopt(self, disk: Disk, records: Iterable[Record]) -> None:
        """See `Store.adopt`."""
        for record in records:
            placed = OnDevice(disk, record)
            opened = self._opened(disk, record.namespace)
            if opened is None:
                self._listing.nvme.set_aside(placed)
            else:
                self._list(placed, opened)

    def _opened(self, disk: Disk, namespace: Namespace) -> OpenNamespace | None:
        opened = self._namespaces.find(namespace)
        if opened is not None:
            return opened
        manifest = disk.manifests.get(namespace)
        if manifest is None:
            return None
        try:
            self._namespaces.open(namespace, manifest)
        except (BadRequest, Overloaded):  # it stays set aside; an engine that brings it is told
            return None
        self.namespace_opened(namespace, manifest)
        return self._namespaces.find(namespace)

    def _list(self, placed: OnDevice, namespace: OpenNamespace) -> None:
        record = placed.record
        listed = self._listing.objects.get(record.key)
        if listed is not None and listed.nvme == placed:
            return
        if listed is not None or not namespace.allows(record.size_bytes):
            placed.disk.delete(record)
            return
        found = Object(record.key, record.parent, record.depth, namespace, record.size_bytes)
        found.generation = record.generation
        found.cold = record.cold
        self._listing.totals.found += 1
        self._listing.add_on_disk(found, placed)
