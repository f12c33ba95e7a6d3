"""Read all objects on NVMe devices that no node uses now and verify them; exit code 1 when something is wrong."""

import argparse
import asyncio
import time
from typing import NamedTuple

from kvstore.cli.devices import add_catalog, add_config, catalogs_of, config_of, parse_size
from kvstore.core import BadConfiguration
from kvstore.node import Config, LogSection, NvmeSection, device_config, in_words, start_logging
from kvstore.tiers import FileDevice, NvmeConfig, NvmeDevice, read_label, scrub

BYTES_PER_S = "256MiB"


class Tally(NamedTuple):
    """What a scrub of one device came to."""

    sound: int
    size_bytes: int
    bad: int
    passed_by: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which devices, and how fast."""
    parser.add_argument(
        "device",
        metavar="DEVICE",
        nargs="*",
        help="Block device, or file. Default: those of the configuration.",
    )
    parser.add_argument(
        "--bytes-per-s",
        metavar="SIZE",
        default=BYTES_PER_S,
        help=f"What each device is read with at most. Default: {BYTES_PER_S}.",
    )
    add_config(parser)
    add_catalog(parser)


def run(options: argparse.Namespace) -> int:
    """Scrubs one device after the other."""
    bytes_per_s = parse_size("--bytes-per-s", options.bytes_per_s)
    if bytes_per_s < 1:
        raise BadConfiguration("--bytes-per-s: it must be at least 1")
    config = config_of(options)
    paths = options.device or [section.path for section in config.nvme]
    if not paths:
        raise BadConfiguration(
            "no device is named: name one, or a configuration that has some (--config FILE)"
        )
    start_logging(LogSection(level="warning"))
    findings = 0
    for path in paths:
        began_s = time.monotonic()
        tally = asyncio.run(_scrub(_config(path, options, config), bytes_per_s))
        findings += tally.bad + tally.passed_by
        print(_summary(path, tally, time.monotonic() - began_s))
    return 1 if findings else 0


def _config(path: str, options: argparse.Namespace, config: Config) -> NvmeConfig:
    """As a node would use it; whoever it belongs to."""
    device = FileDevice.open(path)
    try:
        node = read_label(device).node
    finally:
        device.close()
    section = NvmeSection(path=path, catalog_folder=str(catalogs_of(options, config, path)))
    return device_config(section, node)


async def _scrub(config: NvmeConfig, bytes_per_s: float) -> Tally:
    """Prints each bad object.

    Raises:
        DeviceRefused, DeviceDown
    """
    device = NvmeDevice(config)
    sound = size_bytes = bad = 0
    try:
        await device.start()
        device.health.check()
        objects = len(device.records)
        async for record, error in scrub(device, bytes_per_s):
            size_bytes += record.size_bytes
            sound += not error
            bad += bool(error)
            if error:
                print(f"{config.path}: bad: {error}", flush=True)
    finally:
        await device.stop()
    return Tally(sound, size_bytes, bad, objects - sound - bad)


def _summary(path: str, tally: Tally, took_s: float) -> str:
    text = (
        f"{path}: {tally.sound} objects are sound, {tally.bad} are bad; "
        f"{in_words(tally.size_bytes)} in {took_s:.1f} s"
    )
    if tally.bad:
        text += ". Bad objects are misses, and go when they are asked for; look at the device (`smartctl -a`)"
    if tally.passed_by:
        text += f". {tally.passed_by} could not be verified: their namespace's manifest is lost"
    return text
