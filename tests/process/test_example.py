"""The program in docs/EXAMPLE.md, run as a user would run it: against a real node, in a process of its own."""

import re
import subprocess
import sys

import pytest

from tests.support.node import running_node

pytestmark = pytest.mark.process


def program(repository, control: str) -> str:
    """The document's only Python block, pointed at the test's node."""
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "docs/EXAMPLE.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 22, "it promises twenty lines"
    assert code.count("127.0.0.1:7400") == 1
    return code.replace("127.0.0.1:7400", control)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_the_example_puts_an_object_and_a_later_process_gets_it(repository, tmp_path) -> None:
    with running_node(tmp_path) as node:
        code = program(repository, node.control)
        assert run(code) == "stored"
        assert run(code).startswith("found 33554432 bytes")
