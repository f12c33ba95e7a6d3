"""Debian packages that a machine is made from, installed when they are missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def debian(packages: Iterable[str]) -> None:
    """Makes sure that these are installed; ends the process with one line if they cannot be."""
    wanted = list(packages)
    state = {name: _is_installed(name) for name in wanted}
    missing = [name for name in wanted if not state[name]]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"this must be run as root, or after: apt-get install {' '.join(missing)}")
    print(f"installing {' '.join(missing)}", flush=True)
    apt("update", "-qq")
    apt("install", "-y", "-qq", "--no-install-recommends", *missing)


def apt(*arguments: str) -> None:
    """Runs apt-get; its output is shown only when it fails."""
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"apt-get {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def program(name: str) -> str:
    """Where a program is."""
    found = shutil.which(name, path=PATH)
    assert found, f"{name} is not installed, although its package is"
    return found


def _is_installed(package: str) -> bool:
    said = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout == "installed"
