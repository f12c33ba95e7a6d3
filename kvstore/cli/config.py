"""Print the configuration that `serve` would use, and where each value comes from.

The output is a valid configuration file. Passwords are not shown.
"""

import argparse
import json

from kvstore.cli.settings import add_settings, load
from kvstore.node import SETTINGS, without_password


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same flags as `serve`."""
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Prints TOML with the origin of each value behind it."""
    config, origins = load(options)
    section = ""
    for setting in SETTINGS:
        if setting.section != section:
            print(f"\n[{setting.section}]" if section else f"[{setting.section}]")
            section = setting.section
        value = getattr(getattr(config, setting.section), setting.key)
        shown = without_password(value) if setting.name == "redis.url" else value
        print(f"{setting.key} = {json.dumps(shown, ensure_ascii=False)}  # {origins[setting.name]}")
    return 0
