"""Run a node until SIGTERM or SIGINT."""

import argparse

from kvstore.cli.settings import add_settings, load
from kvstore.node import run as run_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every setting is a flag."""
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the node; returns when it has stopped."""
    return run_node(load(options).config)
