"""Print the version of this program and of the control protocol."""

import argparse

from kvstore import __version__
from kvstore.wire import VERSIONS_SPOKEN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes none."""


def run(options: argparse.Namespace) -> int:
    """Prints one line."""
    spoken = ", ".join(map(str, VERSIONS_SPOKEN))
    print(f"kvstore {__version__} (control protocol {spoken})")
    return 0
