"""Engines with tiny models of several kinds of KV around a real node: `make test-hybrid`.

    python -m tests.hybrid.stage [--only gemma3,...] [--parts write,share,zero,flip,kill]

Per model: one engine computes, pushes, hits, pulls, is harmed and outlives its node; then, at another node, a fresh
process pulls what one has pushed that is gone. What is checked is in `tests.hybrid.play`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.demo.node import Node
from tests.hybrid.models import MODELS, make_model
from tests.hybrid.saboteur import ORDERS
from tests.support import free_port

PLAY_S = 300.0


def play(model: str, folder: Path, node: Node, admin_port: int, scratch: Path, parts: str) -> int:
    """One engine, from its start to its end; what it prints is passed on."""
    admin = f"http://127.0.0.1:{admin_port}"
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
    command += ["--node", node.control, admin, str(node.pid), "--parts", parts]
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


def play_all(models: Sequence[str], scratch: Path, parts: str, *, fresh: bool) -> int:
    """How many engines did not show what they must."""
    bad = 0
    for model in models:
        began = time.monotonic()
        folder = scratch / model.removesuffix("-fp8")
        if not folder.exists():
            make_model(model, folder)
        found = on_a_node(model, folder, scratch, [parts])
        if fresh:
            found += on_a_node(model, folder, scratch, ["write", "read"])
        bad += found
        print(f"{model}: {'BAD' if found else 'ok'} ({time.monotonic() - began:.0f} s)", flush=True)
    return bad


def on_a_node(model: str, folder: Path, scratch: Path, engines: Sequence[str]) -> int:
    """Engines one after the other, each given its parts, on a node with nothing in it; how many failed."""
    control, admin = free_port(), free_port()
    node = Node(control, admin, scratch, name=f"kvstore-{model}-{engines[-1].replace(',', '-')}")
    try:
        node.wait_ready()
        return sum(play(model, folder, node, admin, scratch, parts) != 0 for parts in engines)
    finally:
        node.stop()


def main(arguments: Sequence[str]) -> int:
    """Plays all models; 0 if everything is as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(MODELS), help="models, comma separated")
    parser.add_argument("--parts", default="write,share,zero,flip,kill")
    parser.add_argument("--no-fresh", action="store_true", help="leave out the fresh process")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        return min(
            1, play_all(options.only.split(","), Path(scratch), options.parts, fresh=not options.no_fresh)
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
