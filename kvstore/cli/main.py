"""Dispatch, and the promise that a user's mistake costs one line: cause, remedy, exit code.

Exit codes: 0 done; 1 it could not be done now (a port is taken, memory is short); 2 it cannot be done as
asked (configuration or usage), trying again will not help.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvstore.cli import check, config, proxy, scrub, serve, version
from kvstore.cli import format as format_device
from kvstore.core import BadConfiguration, KVStoreError
from kvstore.node import SETTINGS

COMMANDS = {
    "serve": serve,
    "proxy": proxy,
    "check": check,
    "format": format_device,
    "scrub": scrub,
    "config": config,
    "version": version,
}


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing usage and ending the process."""
        raise BadConfiguration(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (`sys.argv` by default) and returns the exit code."""
    parser = Parser(
        prog="kvstore", description="A KV cache store for fleets of LLM engines.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    try:
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.error(f"unknown argument {unknown[0]}{_guess(unknown[0])}")
        code: int = options.run(options)
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadConfiguration) else 1
    except BrokenPipeError:  # the reader of our output has seen enough
        return 1
    return code


def _guess(argument: str) -> str:
    near = difflib.get_close_matches(argument.partition("=")[0], [setting.flag for setting in SETTINGS], n=1)
    return f": did you mean {near[0]}?" if near else ""
