"""The devices of the NVMe tier, as far as they can be checked before any of them is opened."""

import dataclasses
import os
import stat
from pathlib import Path

from kvstore.core import BadConfiguration
from kvstore.node.refusing import Origins, refuse
from kvstore.node.sections import Config, NvmeSection
from kvstore.node.settings import split_address

STATE_FOLDER = "/var/lib/kvstore"  # of what belongs to no file


def settle_devices(config: Config, origins: Origins) -> tuple[NvmeSection, ...]:
    """The devices with every default filled in.

    Raises:
        BadConfiguration: one line with cause and remedy.
    """
    devices = config.nvme
    for number, device in enumerate(devices):
        name = f"nvme[{number}].path" if number else "nvme.path"
        if not device.path:
            raise refuse(origins, name, "a device needs a path: a block device, or a file")
        if any(os.path.realpath(other.path) == os.path.realpath(device.path) for other in devices[:number]):
            raise refuse(origins, name, f"{device.path} is named twice: one table for each device")
    _check_name(config, origins)
    return tuple(
        dataclasses.replace(device, catalog_folder=device.catalog_folder or catalog_folder(device.path))
        for device in devices
    )


def is_file_to_make(path: str) -> bool:
    """Whether nothing is there, and a file may be made: under /dev only the kernel makes things."""
    return not os.path.lexists(path) and not Path(os.path.abspath(path)).is_relative_to("/dev")


def _check_name(config: Config, origins: Origins) -> None:
    """A device bears its node's name."""
    if not config.nvme or config.node.id or split_address(config.control.listen)[1]:
        return
    raise BadConfiguration(
        "node.id: devices bear the name of their node, which must be the same after a restart: with an NVMe tier "
        "and a control port that the kernel chooses, give the node a name (--node-id NAME)"
    )


def catalog_folder(path: str) -> str:
    """Where the catalog of a device lies unless told otherwise."""
    try:
        is_block = stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        is_block = not is_file_to_make(path)
    return STATE_FOLDER if is_block else f"{path}.catalog"
