"""What runs in the machine: the cable is laid, then pytest runs the suite."""

import os
import subprocess
import sys
from pathlib import Path

from tests.rdma import wire
from tests.support import wait_until

SUITE = "tests/rdma/suite.py"
OPTIONS = (
    *("-v", "-p", "no:cacheprovider", "--timeout=150", "-m", ""),
    *("--tb=short", "--show-capture=no", "--color=no"),
)


def main() -> int:
    """The exit code of pytest."""
    wire.lay()
    states = list(Path("/sys/class/infiniband").glob("*/ports/1/state"))
    wait_until(lambda: all("ACTIVE" in state.read_text() for state in states), 10)
    print(f"adapters: {', '.join(sorted(state.parts[4] for state in states))}", flush=True)
    environment = {**os.environ, "LD_PRELOAD": "/usr/lib/retries.so", "MC_TRANSFER_TIMEOUT": "5"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, SUITE, *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
