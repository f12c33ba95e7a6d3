"""Packages that only benchmarks use, from PyPI into folders of their own, so that `.venv` stays what is tested."""

import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1] / ".cache/bench"


class NotToBeHad(Exception):
    """pip could not get it. The message is what pip said last."""


def installed(name: str, version: str) -> Path:
    """The folder of a package, without what it asks for; its programs are in `bin`.

    Raises:
        NotToBeHad: it cannot be installed.
    """
    folder = HOME / f"{name}-{version}"
    if not (folder / "bin").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        done = subprocess.run(
            [*command, "--target", str(folder), f"{name}=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NotToBeHad(
                f"{name} {version} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
            )
    return folder
