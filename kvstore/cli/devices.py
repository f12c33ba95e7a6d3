"""What the commands about NVMe devices share: flags, whose device it is to be, and what lies on one now."""

import argparse
import os
import shutil
import subprocess
import time
from pathlib import Path

from kvstore.core import BadConfiguration
from kvstore.node import SIZE, Config, catalog_folder, load_config
from kvstore.tiers import FORMAT_VERSION, DeviceRefused, FileDevice, Label, read_label

_PROBE_S = 10.0


def add_config(parser: argparse.ArgumentParser) -> None:
    """The flag that names the node's configuration."""
    parser.add_argument(
        "--config", metavar="FILE", default="", help="The node's TOML file (else $KVSTORE_CONFIG names it)."
    )


def add_catalog(parser: argparse.ArgumentParser) -> None:
    """The flag that says where the catalog is."""
    parser.add_argument(
        "--catalog-folder",
        metavar="FOLDER",
        default="",
        help="Folder for its catalog. Default: DEVICE.catalog beside a file, /var/lib/kvstore for a block device.",
    )


def config_of(options: argparse.Namespace, **flags: str) -> Config:
    """The node's configuration, as `serve` would read it. A flag that was not given is empty.

    Raises:
        BadConfiguration
    """
    given = {name.replace("_", ".", 1): value for name, value in flags.items() if value}
    return load_config(given, file=options.config).config


def catalogs_of(options: argparse.Namespace, config: Config, device: str) -> Path:
    """The folder for a device's catalog: as the flag says, else the configuration, else the default."""
    configured = [each for each in config.nvme if os.path.realpath(each.path) == os.path.realpath(device)]
    folder = options.catalog_folder or (
        configured[0].catalog_folder if configured else catalog_folder(device)
    )
    return Path(folder)


def parse_size(flag: str, text: str) -> int:
    """Bytes.

    Raises:
        BadConfiguration: it is not a size.
    """
    try:
        return int(SIZE.parse(text))
    except ValueError:
        raise BadConfiguration(f"{flag}: expected {SIZE.expected}, not {text!r}") from None


def look(device: FileDevice) -> tuple[Label | None, str]:
    """The label of a device, if it has one of ours, and what lies on it, as the beginning of a sentence.

    Raises:
        DeviceDown: it does not answer.
    """
    try:
        label = read_label(device)
    except DeviceRefused as refused:
        foreign = _probe(device.name)
        return None, f"{device.name} holds {foreign}" if foreign else str(refused).partition(":")[0]
    formatted = time.strftime("%Y-%m-%d", time.gmtime(label.created_s)) if label.created_s else "some day"
    return label, (
        f"{device.name} is a kvstore device (format {FORMAT_VERSION}) of the node {label.node!r}, "
        f"formatted on {formatted}, used {label.epoch} times, uuid {label.uuid_text}"
    )


def _probe(path: str) -> str:
    """What util-linux recognises: a file system, a partition table, a RAID member. Empty: nothing, or no blkid."""
    blkid = shutil.which("blkid", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if blkid is None:
        return ""
    try:
        said = subprocess.run(
            [blkid, "-p", "-o", "export", path], capture_output=True, text=True, timeout=_PROBE_S, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return ""
    found = dict(line.partition("=")[::2] for line in said.splitlines())
    if "TYPE" in found:
        label = f" {found['LABEL']!r}" if "LABEL" in found else ""
        return f"{found['TYPE']}{label} (says blkid)"
    return f"a partition table ({found['PTTYPE']}, says blkid)" if "PTTYPE" in found else ""
