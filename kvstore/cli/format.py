"""Make a block device or a file one of this node's NVMe devices; or rebuild its catalog.

Whatever a device holds is lost when it is formatted, so what that is, and whose, is said first, and asked for.
"""

import argparse
import os
import shutil
import stat
import sys
import time
from pathlib import Path

from kvstore.cli.devices import add_catalog, add_config, catalogs_of, config_of, look, parse_size
from kvstore.core import BadConfiguration
from kvstore.node import Config, in_words
from kvstore.tiers import FileDevice, create_file, format_device, mount, read_label

_YES = "yes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The device, and whose it is to be."""
    parser.add_argument("device", metavar="DEVICE", help="Block device, or file.")
    parser.add_argument("--size", metavar="SIZE", default="", help="Make the file DEVICE, of this size.")
    parser.add_argument(
        "--page-bytes", metavar="SIZE", default="", help="Size of its pages. Default: dram.page_bytes."
    )
    parser.add_argument("--yes", action="store_true", help="Do not ask before what is there is destroyed.")
    parser.add_argument(
        "--rebuild-catalog",
        action="store_true",
        help="Destroy nothing: make the catalog anew from the records on the device.",
    )
    parser.add_argument(
        "--node-id",
        metavar="ID",
        default="",
        help="The node that the device is to belong to. Default: node.id, else host name and control port.",
    )
    add_config(parser)
    add_catalog(parser)


def run(options: argparse.Namespace) -> int:
    """Formats, or rebuilds."""
    config = config_of(options, node_id=options.node_id)
    if options.rebuild_catalog:
        return _rebuild(options, config)
    page_bytes = (
        parse_size("--page-bytes", options.page_bytes) if options.page_bytes else config.dram.page_bytes
    )
    made = _make_file(options)
    device = FileDevice.open(options.device)
    old = None
    try:
        if not made:
            old, there = look(device)
            if not options.yes:
                _ask(f"{there}. Formatting destroys all of it.", options.device)
        label = format_device(device, config.node.id, page_bytes, created_s=int(time.time()))
    except BaseException:
        if made:
            os.unlink(options.device)
        raise
    finally:
        device.close()
    if old is not None:  # nothing will ever ask for it again
        shutil.rmtree(catalogs_of(options, config, options.device) / old.uuid_text, ignore_errors=True)
    print(
        f"{options.device} is an empty device of the node {label.node!r}: {label.page_count} pages of "
        f"{label.page_bytes} B, {in_words(label.page_count * label.page_bytes)}, uuid {label.uuid_text}"
    )
    return 0


def _make_file(options: argparse.Namespace) -> bool:
    """Makes the file if it was asked for; whether it did.

    Raises:
        BadConfiguration: what is there does not fit what was asked for.
        DeviceDown: there is no room for it.
    """
    path = Path(options.device)
    if not path.exists():
        if not options.size:
            raise BadConfiguration(
                f"{path} does not exist: name a device that is there (`lsblk` lists them), or add --size 100GiB to "
                "make it a file of that size"
            )
        if path.absolute().is_relative_to("/dev"):
            raise BadConfiguration(f"{path} is not there, and files are not made in /dev: see `lsblk`")
        create_file(str(path), parse_size("--size", options.size))
        return True
    if options.size:
        what = "is a block device" if stat.S_ISBLK(path.stat().st_mode) else "exists already"
        raise BadConfiguration(f"{path} {what} and keeps its size: leave --size out, or name another file")
    return False


def _ask(question: str, device: str) -> None:
    """Returns if the user says yes.

    Raises:
        BadConfiguration: they do not, or there is nobody to ask.
    """
    if not sys.stdin.isatty():
        raise BadConfiguration(f"{question} Nobody is there to be asked: add --yes to do it anyway")
    print(f"{question} Type {_YES!r} to go on: ", end="", flush=True)
    if sys.stdin.readline().strip() != _YES:
        raise BadConfiguration(f"{device} was left as it is")


def _rebuild(options: argparse.Namespace, config: Config) -> int:
    if options.size or options.page_bytes:
        raise BadConfiguration("--rebuild-catalog changes neither size nor pages: leave those flags out")
    device = FileDevice.open(options.device)
    try:
        node = read_label(device).node
    except BaseException:
        device.close()
        raise
    mounted = mount(device, node, catalogs_of(options, config, options.device), anew=True)
    mounted.volume.close()
    for note in mounted.notes:
        print(note)
    size_bytes = sum(record.size_bytes for record in mounted.objects)
    print(f"{options.device}: {len(mounted.objects)} objects, {in_words(size_bytes)}, node {node!r}")
    return 0
