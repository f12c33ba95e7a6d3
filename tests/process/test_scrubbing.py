"""A node that scrubs its devices finds what is damaged before anybody asks for it."""

from pathlib import Path

import pytest

from kvstore.tiers import FileDevice, mount
from tests.cli.nvme import flip
from tests.faults.streaming import StreamingEngine
from tests.faults.support import chain
from tests.process.test_nvme_node import MODEL, push_all, settings, totals
from tests.support import wait_until
from tests.support.node import running_node

pytestmark = pytest.mark.process

KEYS = chain(MODEL.namespace, 32, 7)
DAMAGED = 20


def test_a_bad_copy_is_gone_before_it_is_asked_for(tmp_path) -> None:
    """A scrub that reads nothing, or tells nobody, leaves it for the reader to find: a bad pull."""
    given = settings(tmp_path, tiers_spill="eager")
    with running_node(tmp_path, **given) as node, StreamingEngine(node.control, MODEL) as engine:
        push_all(engine, KEYS)
        assert node.stop() == 0
    damage(tmp_path / "device", DAMAGED)
    with running_node(tmp_path, **given, tiers_scrub_bytes_per_s="100MiB") as node:
        wait_until(lambda: totals(node)["bad_copies"] == 1)
        with StreamingEngine(node.control, MODEL) as engine:
            done = engine.stream(KEYS)
            assert (done.got, done.bad) == (DAMAGED, 0), done
        assert totals(node)["bad_copies"] == 1


def damage(path: Path, number: int) -> None:
    """One bit of one object."""
    mounted = mount(FileDevice.open(str(path)), "n1", Path(f"{path}.catalog"))
    (record,) = [record for record in mounted.objects if record.key == KEYS[number]]
    label = mounted.volume.label
    mounted.volume.close()
    flip(path, record, label.data_offset, label.page_bytes)
