"""A node whose log cannot be written goes on, and ends."""

import signal
from contextlib import ExitStack

import pytest

from kvstore.client import KVStore
from kvstore.core import Manifest
from tests.support import Process
from tests.support.full_pipe import FullPipe
from tests.support.node import RunningNode, node_command

pytestmark = pytest.mark.process

ADVISED = Manifest(
    weights="w",
    model={},
    kv_dtype="float32",
    tile_format="t",
    chunk_tokens=256,
    unit_tokens=1,
    lanes=((32, 8, 512),),
)
"""Objects of 32 MiB: a node with 64 MiB advises more, in its log, while it answers Hello."""


def answers_hello(node: RunningNode) -> None:
    """Within the client's time-out, or it raises."""
    with KVStore(node.control, timeout_s=20.0) as store:
        store.open(ADVISED)


@pytest.mark.parametrize("where", ["file", "standard error"])
def test_a_log_that_hangs_neither_stops_nor_keeps_a_node(where, tmp_path) -> None:
    """The pipe is full all the time, and what is written when it is read at last proves that somebody hung there.
    Mutants: lines written by the loop; an end that waits for the thread that writes; writing through `sys.stderr`."""
    pipe = FullPipe(tmp_path / "pipe")
    settings = {"log_file": pipe.path} if where == "file" else {}
    command = node_command(**settings)
    if where != "file":
        command = ["sh", "-c", 'pipe=$1; shift; exec "$@" 2>"$pipe"', "sh", str(pipe.path), *command]
    with ExitStack() as stack:
        stack.callback(pipe.close)
        node = RunningNode(stack.enter_context(Process(command, tmp_path / "output")))
        pipe.fill()
        for _ in range(2):
            answers_hello(node)
        assert pipe.is_full
        assert node.get("/healthz")[0] == 200
        lines = pipe.read_until("give the node at least 256 MiB")
        assert any("level=WARNING at=kvstore.server.calls namespace " in line for line in lines)
        pipe.fill()
        node.process.send(signal.SIGTERM)
        assert node.process.popen.wait(30) == 0
        assert pipe.is_full
