"""Nothing here is safe only because nothing is hit: with a store that always misses, every test of safety fails.

Those that pass all the same are named, with the reason: what they show does not need a hit. By hand: `make soak`.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(3_000)]

SUITES = ["sim", "identity", "faults", "crash"]
NEEDS_NO_HIT = {
    "test_what_was_reported_survives_every_kill_and_nothing_else_appears": "reads devices, without a store",
}


@pytest.mark.parametrize("suite", SUITES)
def test_with_a_store_that_always_misses_it_fails(suite: str, tmp_path: Path, repository: Path) -> None:
    report = tmp_path / "report.xml"
    patience = ["--timeout=900"]  # Hypothesis shrinks what it finds
    quiet = ["-q", "--tb=no", "-p", "no:unraisableexception"]  # a test that fails leaves sockets behind
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.always_miss", f"tests/{suite}"]
    command += [*patience, *quiet, f"--junitxml={report}"]
    done = subprocess.run(command, cwd=repository, env={**os.environ, "SOAK": "0"}, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    cases = list(ET.parse(report).iter("testcase"))
    passed = {case.attrib["name"].partition("[")[0] for case in cases if not len(case)}
    print(f"{suite}: {len(cases)} tests, {sum(not len(case) for case in cases)} of them pass")
    assert passed <= NEEDS_NO_HIT.keys()
