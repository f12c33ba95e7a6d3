"""The socket over which clients on this host get the arena's memory."""

import os
from pathlib import Path

from kvstore.core import BadConfiguration
from kvstore.node.sections import TransferSection
from kvstore.tiers import Arena
from kvstore.transfer import ArenaSocket
from kvstore.wire import BootId


def share_arena(settings: TransferSection, arena: Arena, boot: BootId, token: bytes) -> ArenaSocket | None:
    """Offers the arena, unless the operator does not want that, or the default directory cannot be used.

    Raises:
        BadConfiguration: the directory that the operator named cannot be used.
    """
    if not settings.shm:
        return None
    folder = Path(settings.shm_dir) if settings.shm_dir else default_folder()
    uids = [int(uid) for uid in settings.shm_uids.split(",") if uid]
    try:
        return ArenaSocket(folder / f"{boot.hex()}.sock", arena.fd, arena.address, token, uids)
    except BadConfiguration as error:
        if settings.shm_dir:
            raise
        arena.warnings.append(f"clients on this host cannot use shared memory: {error}")
        return None


def default_folder(run: Path = Path("/run")) -> Path:
    """Where this user can have a directory of its own that does not outlive the machine."""
    if os.access(run, os.W_OK):
        return run / "kvstore"
    own = run / "user" / str(os.getuid())
    return own / "kvstore" if own.is_dir() else Path(f"/tmp/kvstore-{os.getuid()}")  # noqa: S108 - checked to be ours
