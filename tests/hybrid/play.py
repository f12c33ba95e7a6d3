"""One engine with a tiny model, played by `tests.hybrid.stage`, one process each.

Prints one line for each check (`tests.hybrid.player`), and ends with 1 if one does not hold.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.hybrid.last_token import LastTokenPlayer
from tests.hybrid.models import MODELS
from tests.hybrid.player import Node, Player
from tests.hybrid.saboteur import ORDERS


def main(arguments: Sequence[str]) -> int:
    """Plays what it is told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", nargs=3, required=True, metavar=("CONTROL", "ADMIN", "PID"))
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--parts", default="write,share,zero,flip,kill")
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args(arguments)
    control, admin, pid = options.node
    orders, keep = Path(os.environ[ORDERS]), options.scratch / "expected.json"
    kind = LastTokenPlayer if MODELS[options.model].last_token else Player
    player = kind(options.model, options.folder, Node(control, admin, int(pid)), orders, options.tp)
    parts = options.parts.split(",")
    for part in parts:
        if part.startswith("warm"):
            player.warm(int(part.removeprefix("warm")))
    if "write" in parts:
        expected = player.write(keep)
    else:
        expected = player.read(keep)
        player.check_same("pulled by a fresh engine", player.one(player.first), expected, player.tail)
    for part in ("share", "zero", "flip", "kill"):
        if part in parts:
            getattr(player, part)(expected)
    return 1 if player.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
