"""Engines with tiny models of several kinds of KV around a real node: `make test-hybrid`.

    python -m tests.hybrid.stage [--only gemma3,...] [--stories alone,fresh,...] [--parts write,share,zero,flip,kill]

Each story has a node of its own, and engines one after the other:

    alone      one engine computes, pushes, hits, pulls, is harmed and outlives its node
    fresh      one pushes and is gone; another pulls
    wider      one pushes; another of TP 2 pulls. And narrower: the other way round
    disk       one pushes; the node is restarted, all is on its NVMe; engines pull while one kind alone is in memory

What is checked is in `tests.hybrid.player`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from deploy.demo.node import Node
from tests.hybrid.models import MODELS, make_model
from tests.hybrid.saboteur import ORDERS
from tests.support import free_port

PLAY_S = 600.0
PARTS = "write,share,zero,flip,kill"


class Turn(NamedTuple):
    """One engine: what it plays, and its tensor parallel size."""

    parts: str
    tp: int = 1


STORIES = {
    "alone": [Turn(PARTS)],
    "fresh": [Turn("write"), Turn("read")],
    "wider": [Turn("write"), Turn("read,zero", tp=2)],
    "narrower": [Turn("write", tp=2), Turn("read,zero")],
    "disk": [Turn("write"), Turn("warm0,read,zero"), Turn("warm1,read,zero")],
}


def play(model: str, folder: Path, node: Node, scratch: Path, turn: Turn) -> int:
    """One engine, from its start to its end; what it prints is passed on."""
    admin = f"http://127.0.0.1:{node.ports[1]}"
    command = [
        sys.executable,
        "-m",
        "tests.hybrid.play",
        model,
        "--folder",
        str(folder),
        "--scratch",
        str(scratch),
    ]
    command += ["--node", node.control, admin, str(node.pid), "--parts", turn.parts, "--tp", str(turn.tp)]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        ORDERS: str(scratch / "orders"),
    }
    log = scratch / f"{model}.log"
    with log.open("a") as errors:
        done = subprocess.run(
            command,
            check=False,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=PLAY_S,
        )
    print(
        "".join(line for line in done.stdout.splitlines(keepends=True) if line.startswith("  ")),
        end="",
        flush=True,
    )
    if done.returncode:
        print("\n".join(log.read_text().splitlines()[-30:]))
    return done.returncode


def play_all(models: Sequence[str], scratch: Path, stories: Mapping[str, Sequence[Turn]]) -> int:
    """How many engines did not show what they must. Of the stories, a model plays the first two and its own."""
    bad = 0
    for model in models:
        began = time.monotonic()
        folder = scratch / model.removesuffix("-fp8")
        if not folder.exists():
            make_model(model, folder)
        found = 0
        for name, turns in stories.items():
            if name in ("alone", "fresh", *MODELS[model].stories):
                found += on_a_node(name, model, folder, scratch, turns)
        bad += found
        print(f"{model}: {'BAD' if found else 'ok'} ({time.monotonic() - began:.0f} s)", flush=True)
    return bad


def on_a_node(story: str, model: str, folder: Path, scratch: Path, turns: Sequence[Turn]) -> int:
    """Engines one after the other on a node with nothing in it; how many failed."""
    ports = free_port(), free_port()
    device = scratch / f"{model}-{story}.nvme"
    disk = ["--nvme-path", str(device), "--nvme-size-bytes", "1GiB", "--node-id", "n1"]

    def boot(number: int) -> Node:
        name, flags = f"kvstore-{model}-{story}-{number}", disk if story == "disk" else ()
        node = Node(*ports, scratch, name=name, flags=flags)
        exits.callback(node.stop)
        node.wait_ready()
        return node

    with ExitStack() as exits:
        node, bad = boot(0), 0
        for number, turn in enumerate(turns):
            if number and story == "disk":
                exits.close()  # what it has in memory goes to its NVMe
                node = boot(number)
            bad += play(model, folder, node, scratch, turn) != 0
    device.unlink(missing_ok=True)
    return bad


def main(arguments: Sequence[str]) -> int:
    """Plays all models; 0 if everything is as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(MODELS), help="models, comma separated")
    parser.add_argument("--stories", default=",".join(STORIES), help="some of these, comma separated")
    parser.add_argument("--parts", default=PARTS, help="of what one engine plays alone")
    options = parser.parse_args(arguments)
    chosen = STORIES | {"alone": [Turn(options.parts)]}
    stories = {name: chosen[name] for name in options.stories.split(",")}
    with tempfile.TemporaryDirectory() as scratch:
        return min(1, play_all(options.only.split(","), Path(scratch), stories))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
