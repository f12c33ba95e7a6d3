"""Mounting: from a device to a volume and the objects on it; and making a device one of ours.

The catalog is used if it is whole and remembers the device's last mount; else it is set aside and rebuilt.
So a catalog restored from a backup, or a device that another host has used meanwhile, cannot mislead.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvstore.core import Extent, limits
from kvstore.tiers.nvme.catalog import Catalog, CatalogDamaged, set_aside
from kvstore.tiers.nvme.device import Device, DeviceDown, DeviceRefused
from kvstore.tiers.nvme.label import MOUNT_BYTES, UUID_BYTES, Label, new_label, read_label, write_label
from kvstore.tiers.nvme.rebuild import rebuild
from kvstore.tiers.nvme.records import SLOT_BYTES, Kind, Record
from kvstore.tiers.nvme.volume import EPOCH_SHIFT, Volume

log = logging.getLogger(__name__)

_CATALOG_OVERHEAD_BYTES = 2_048  # of an object, beside its table: more than LMDB needs


class OpenCatalog(Protocol):
    """What `Catalog` does when it is called."""

    def __call__(self, folder: Path, map_bytes_max: int, *, new: bool) -> Catalog:
        """Opens a catalog, or makes a new one."""


class Mounted(NamedTuple):
    """A volume and what is on it. `notes` are lines for the log."""

    volume: Volume
    objects: list[Record]
    namespaces: list[Record]
    notes: list[str]


class _Contents(NamedTuple):
    catalog: Catalog
    records: list[Record]
    doubtful: list[Extent]
    notes: list[str]


def mount(
    device: Device,
    node: str,
    catalogs: Path,
    random_bytes: Callable[[int], bytes] = os.urandom,
    *,
    anew: bool = False,
    open_catalog: OpenCatalog = Catalog,
) -> Mounted:
    """Mounts a device: what was reported when it was last used is there again.

    Args:
        device: opened for us alone; closed when this fails.
        node: the name of this node.
        catalogs: the folder of catalogs, one for each device, named after its uuid.
        random_bytes: for the mount's id.
        anew: rebuild the catalog from the records, whatever it is like.
        open_catalog: the seam to LMDB.

    Raises:
        DeviceRefused: it is not a device of this node, or has another format.
        DeviceDown: the device, or the folder of catalogs, fails.
    """
    try:
        label = read_label(device)
        _check_owner(device, label, node)
        contents = _contents(device, label, catalogs / label.uuid_text, open_catalog, anew=anew)
    except BaseException:
        device.close()
        raise
    try:
        return _enter(device, label, contents, random_bytes(MOUNT_BYTES))
    except BaseException:
        contents.catalog.close()
        device.close()
        raise


def format_device(
    device: Device,
    node: str,
    page_bytes: int = limits.PAGE_BYTES_DEFAULT,
    *,
    created_s: int = 0,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> Label:
    """Makes a device one of ours, empty, for this node. Whatever it held is lost. Asks nobody.

    Records of an earlier format need not be wiped: they bear another uuid.

    Raises:
        BadConfiguration: it is too small.
        DeviceDown
    """
    label = new_label(device.size_bytes, page_bytes, node, random_bytes(UUID_BYTES), created_s)
    write_label(device, label)
    return label


def create_file(path: str, size_bytes: int) -> None:
    """A file to be used as a device, with all its space, so that it cannot run out of it later.

    Raises:
        FileExistsError: it is left alone.
        DeviceDown: there is no room for it, or it cannot be made.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise DeviceDown(f"{path} cannot be made: {error.strerror}") from error
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.unlink(path)
        raise DeviceDown(
            f"there is no room for {path} of {size_bytes >> 20} MiB: {error.strerror}"
        ) from error
    finally:
        os.close(fd)


def _check_owner(device: Device, label: Label, node: str) -> None:
    if label.node != node:
        raise DeviceRefused(
            f"{device.name} belongs to the node {label.node!r}, this is {node!r}: start the node under that name "
            f"(`node.id`), or give up what the device holds with `kvstore format {device.name}`"
        )
    if device.size_bytes < label.data_offset + label.page_bytes:
        raise DeviceRefused(
            f"{device.name} was cut to {device.size_bytes} of {label.size_bytes} bytes, no object is left: "
            f"`kvstore format {device.name}` makes it usable again"
        )


def _enter(device: Device, label: Label, contents: _Contents, mount_id: bytes) -> Mounted:
    """Writes the new label, and brings device and catalog together."""
    catalog, records, doubtful, notes = contents
    newest = max((record.sequence for record in records), default=0)
    epoch = max(label.epoch, newest >> EPOCH_SHIFT) + 1
    mounted = msgspec.structs.replace(label, epoch=epoch, mount=mount_id)
    catalog.set_meta(mount=mounted.mount, previous=label.mount)  # first: it knows the label before and after
    write_label(device, mounted)
    volume = Volume(device, mounted, catalog)
    volume.erase(doubtful)
    page_count = volume.page_count
    outside = [record for record in records if not _is_inside(record, page_count)]
    if outside:
        notes.append(
            f"{device.name} is smaller than when it was formatted: {len(outside)} of its objects are lost, "
            f"{page_count} of {label.page_count} pages are left"
        )
    gone = {*outside, *_unused_namespaces(records)}
    if gone:
        volume.commit((), list(gone))
        records = [record for record in records if record not in gone]
    catalog.proved()
    objects = [record for record in records if record.kind is Kind.OBJECT]
    return Mounted(volume, objects, [record for record in records if record.kind is Kind.NAMESPACE], notes)


def _contents(
    device: Device, label: Label, folder: Path, open_catalog: OpenCatalog, *, anew: bool
) -> _Contents:
    """The catalog and what is in it, rebuilt if need be."""
    per_slot_bytes = SLOT_BYTES + _CATALOG_OVERHEAD_BYTES
    map_bytes_max = limits.CATALOG_MAP_BYTES_MIN + label.slot_count * per_slot_bytes
    try:
        if anew:
            raise CatalogDamaged("it was asked for")
        return _known(label, open_catalog(folder, map_bytes_max, new=False))
    except CatalogDamaged as damage:
        why = str(damage)
    aside = set_aside(folder)
    try:
        catalog = open_catalog(folder, map_bytes_max, new=True)
    except CatalogDamaged as error:
        raise DeviceDown(f"no catalog can be made for {device.name}: {error}") from error
    try:
        return _rebuilt(device, label, catalog, f"{why}; it was moved to {aside}" if aside else why)
    except BaseException:
        catalog.close()
        raise


def _known(label: Label, catalog: Catalog) -> _Contents:
    try:
        if label.mount not in (catalog.meta("mount"), catalog.meta("previous")):
            raise CatalogDamaged(f"{catalog.folder} is not that of the device's last use")
        return _Contents(catalog, *catalog.load(), [])
    except BaseException:
        catalog.close()
        raise


def _rebuilt(device: Device, label: Label, catalog: Catalog, why: str) -> _Contents:
    if label.epoch == 0:  # never mounted since it was formatted
        return _Contents(catalog, [], [], [])
    found = rebuild(device, label, catalog)
    note = (
        f"the catalog of {device.name} was made anew from the records on the device ({why}): "
        f"{sum(record.kind is Kind.OBJECT for record in found.records)} objects"
    )
    if found.stale:
        note += f", {len(found.stale)} stale records dropped"
    if found.unreadable_slots:
        note += f", {found.unreadable_slots} places could not be read"
    return _Contents(catalog, found.records, [record.slots for record in found.stale], [note])


def _is_inside(record: Record, page_count: int) -> bool:
    return all(start + count <= page_count for start, count in record.extents)


def _unused_namespaces(records: list[Record]) -> list[Record]:
    used = {record.namespace for record in records if record.kind is Kind.OBJECT}
    return [record for record in records if record.kind is Kind.NAMESPACE and record.namespace not in used]
