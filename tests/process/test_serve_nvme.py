"""Real `kvstore serve` processes with an NVMe tier: what they say of it, and which devices they refuse."""

import pytest

from tests.support import Process, wait_until
from tests.support.node import node_command, running_node

pytestmark = pytest.mark.process


def refused(tmp_path, **settings: object) -> str:
    with Process(node_command(**settings), tmp_path / "refused.log") as process:
        assert process.popen.wait(30) == 2
        output = process.output()
    assert output.startswith("kvstore: ")
    assert output.count("\n") == 1, output
    return output


def test_a_device_is_made_at_the_first_start_and_belongs_to_its_node(tmp_path) -> None:
    path = tmp_path / "device"
    settings = {"nvme_path": path, "nvme_size_bytes": "32MiB", "node_id": "n1"}
    with running_node(tmp_path, **settings) as node:
        assert f"  nvme      {path}, 30 MiB, 0 objects found on it, spill = evict" in node.banner
        assert "devices bear the name" not in node.banner
        assert "is used by another process" in refused(tmp_path, **settings)
        assert node.stop() == 0
    line = refused(tmp_path, **{**settings, "node_id": "n2"})
    assert "belongs to the node 'n1', this is 'n2'" in line
    with running_node(tmp_path, **settings) as node:
        assert "0 objects found on it" in node.banner


def test_it_starts_without_a_device_that_is_not_there(tmp_path) -> None:
    with running_node(tmp_path, nvme_path="/dev/kvstore-not-there", node_id="n1") as node:
        assert "/dev/kvstore-not-there: not there yet" in node.banner
        wait_until(lambda: node.get("/readyz")[0] == 200)
