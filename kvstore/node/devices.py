"""The devices of the configuration, made where they are files that are not there yet."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.core import BadConfiguration, KVStoreError
from kvstore.node.device_checks import is_file_to_make
from kvstore.node.sections import Config, NvmeSection
from kvstore.tiers import DeviceDown, FileDevice, NvmeConfig, NvmeDevice, NvmeTier, create_file, format_device


def make_tier(config: Config, on_found: Callable[[NvmeDevice], None] = lambda _: None) -> NvmeTier:
    """The NVMe tier of a node, not started yet. Blocking: files may be made.

    Args:
        config: complete.
        on_found: is told of each device that was mounted, at the start or later.

    Raises:
        BadConfiguration: a file is missing, and cannot be made as it was asked for.
        KVStoreError: there is no room for one.
    """
    for section in config.nvme:
        if is_file_to_make(section.path):
            _check_place(section)
            _make_file(section, config.node.id, config.dram.page_bytes)
    return NvmeTier(
        [NvmeDevice(device_config(each, config.node.id), on_found=on_found) for each in config.nvme]
    )


def device_config(section: NvmeSection, node: str) -> NvmeConfig:
    """What the tier wants to know of a device of this node."""
    return NvmeConfig(
        path=section.path,
        node=node,
        catalogs=Path(section.catalog_folder),
        threads=section.threads,
        deadline_s=section.deadline_s,
        write_bytes_per_day=section.write_bytes_per_day,
    )


def _check_place(section: NvmeSection) -> None:
    if not section.size_bytes:
        raise BadConfiguration(
            f"nvme.path: there is no {section.path}: to have a file made, say how large (nvme.size_bytes)"
        )
    folder = Path(section.path).absolute().parent
    if not folder.is_dir():
        raise BadConfiguration(f"nvme.path: there is no folder {folder} for {section.path}: make it first")


def _make_file(section: NvmeSection, node: str, page_bytes: int) -> None:
    """A formatted file, or none: it gets its name when it is whole."""
    unfinished = f"{section.path}.unfinished"
    Path(unfinished).unlink(missing_ok=True)
    try:
        create_file(unfinished, section.size_bytes)
        device = FileDevice.open(unfinished)
        try:
            format_device(device, node, page_bytes, created_s=int(time.time()))
        finally:
            device.close()
        os.rename(unfinished, section.path)
    except DeviceDown as error:
        raise KVStoreError(f"nvme.path: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)
