"""The `kvstore` command: one file per subcommand."""

from kvstore.cli.main import main

__all__ = ["main"]
