"""Objects on NVMe: fast, bounded, and still there after a crash. docs/FORMAT.md shows what lies on a device."""

from kvstore.tiers.nvme.base import Counts, Get, NewObject, Refusal
from kvstore.tiers.nvme.device import Device, DeviceDown, DeviceRefused, FileDevice, aligned
from kvstore.tiers.nvme.label import FORMAT_VERSION, Label, read_label
from kvstore.tiers.nvme.mounting import Mounted, create_file, format_device, mount
from kvstore.tiers.nvme.nvme_device import NvmeConfig, NvmeDevice, NvmeStats
from kvstore.tiers.nvme.records import Kind, Record
from kvstore.tiers.nvme.scrub import Scrubbed, scrub
from kvstore.tiers.nvme.tier import NvmeTier, Placed
from kvstore.tiers.nvme.volume import PagesFailed, Volume

__all__ = [
    "Counts",
    "FORMAT_VERSION",
    "Device",
    "DeviceDown",
    "DeviceRefused",
    "FileDevice",
    "Get",
    "Kind",
    "Label",
    "Mounted",
    "NewObject",
    "NvmeConfig",
    "NvmeDevice",
    "NvmeStats",
    "NvmeTier",
    "PagesFailed",
    "Placed",
    "Record",
    "Refusal",
    "Scrubbed",
    "Volume",
    "aligned",
    "create_file",
    "format_device",
    "mount",
    "read_label",
    "scrub",
]
