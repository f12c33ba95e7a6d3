"""Print the configuration that `serve` would use, and where each value comes from.

The output is a valid configuration file. Passwords are not shown.
"""

import argparse
import json
from itertools import groupby

from kvstore.cli.settings import add_settings, load
from kvstore.node import REPEATED, SETTINGS, name_in, tables_of, without_password


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same flags as `serve`."""
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Prints TOML with the origin of each value behind it."""
    config, origins = load(options)
    for section, settings in groupby(SETTINGS, key=lambda setting: setting.section):
        own = list(settings)
        for number, table in enumerate(tables_of(config, section)):
            print(f"\n[[{section}]]" if section == REPEATED else f"\n[{section}]")
            for setting in own:
                value = getattr(table, setting.key)
                shown = without_password(value) if setting.name == "redis.url" else value
                origin = origins.get(name_in(number, setting.name), "default")
                print(f"{setting.key} = {json.dumps(shown, ensure_ascii=False)}  # {origin}")
    return 0
