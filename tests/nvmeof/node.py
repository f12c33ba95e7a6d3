"""The same through a node: `kvstore serve` with the device as its NVMe tier, killed, restarted, its link cut."""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.client import open_transfer
from kvstore.core import MissReason
from tests.faults.streaming import StreamingEngine
from tests.faults.support import chain, shape
from tests.nvmeof.network import Link
from tests.support import wait_until
from tests.support.node import RunningNode, running_node

OBJECTS, ROOM = 48, "24MiB"
MODEL = shape(1 << 20)
PROMPTS = [chain(MODEL.namespace, 1, seed) for seed in range(OBJECTS)]
DEADLINE_S, MARGIN_S = 3.0, 1.0
CUT_S, BACK_S = 15.0, 60.0

Say = Callable[[str], None]


class Reader:
    """Reads prompts by shared memory, one at a time; every byte is compared."""

    def __init__(self, node: RunningNode) -> None:
        transfer = open_transfer("shm", node.control)
        self.node = node
        self.engine = StreamingEngine(node.control, MODEL, request_timeout_s=5.0, transfer=transfer)
        self.longest_s = 0.0
        self.seen: Counter[str] = Counter()
        self._random = random.Random(1)

    def read(self, number: int = -1) -> None:
        """This prompt, or any: counts a hit in DRAM, a hit from NVMe, or why not."""
        keys = PROMPTS[number] if number >= 0 else self._random.choice(PROMPTS)
        began = time.monotonic()
        done = self.engine.stream(keys)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        assert done.bad == 0, done
        self.seen["from NVMe" if done.from_nvme else "from DRAM" if done.got else f"miss: {done.reason}"] += 1

    def round(self) -> Counter[str]:
        """All prompts once."""
        self.forget()
        for number in range(OBJECTS):
            self.read(number)
        return self.seen

    def forget(self) -> None:
        """Counts from now on."""
        self.seen, self.longest_s = Counter(), 0.0


def story(path: str, node_id: str, catalogs: Path, link: Link, say: Say) -> None:
    """Spill, kill, restart, warm hits; the link cut and whole again."""
    folder = Path(tempfile.mkdtemp())
    settings: dict[str, object] = {
        "node_id": node_id,
        "nvme_path": path,
        "nvme_threads": 8,
        "nvme_deadline_s": DEADLINE_S,
        "nvme_catalog_folder": catalogs,
        "tiers_spill": "eager",
        "dram_size_bytes": ROOM,
    }
    with running_node(folder, **settings) as node:
        with Reader(node).engine as engine:
            push_all(engine)
        wait_until(lambda: totals(node)["spilled"] == OBJECTS, 60, "all is on NVMe")
        say(
            f"a node of {ROOM} took {OBJECTS} objects of 1 MiB, {totals(node)['spilled']} were spilled; killed"
        )
        node.kill()
    with running_node(folder, **settings) as node:
        reader = Reader(node)
        with reader.engine:
            seen = reader.round()
            say(f"restarted: {dict(seen)}")
            assert seen["from NVMe"] == OBJECTS
            cut(link, reader, say)
            back(link, reader, say)
        assert node.stop() == 0


def cut(link: Link, reader: Reader, say: Say) -> None:
    """Reads go on while the link is silent: what DRAM holds hits, the rest misses, and nobody waits."""
    reader.forget()
    down = time.monotonic()
    link.down()
    while time.monotonic() < down + CUT_S:
        reader.read()
    failed = totals(reader.node)["failed_promotions"]
    say(
        f"cut for {CUT_S:g} s: {dict(reader.seen)}; failed promotions {failed}; the longest read took "
        f"{reader.longest_s:.2f} s (deadline {DEADLINE_S:g} s)"
    )
    assert reader.seen["from DRAM"] >= 1, "the node served nothing"
    assert reader.seen[f"miss: {MissReason.DEVICE_DOWN}"] >= 10, "the device was not given up"
    assert failed.get(MissReason.DEVICE_DOWN, 0) >= 1, "nothing was under way when the link was cut"
    assert reader.longest_s <= DEADLINE_S + MARGIN_S, "a reader waited"


def back(link: Link, reader: Reader, say: Say) -> None:
    """Everything is there again, by itself."""
    up = time.monotonic()
    link.up()

    def reads_from_nvme() -> bool:
        reader.forget()
        reader.read()
        return bool(reader.seen["from NVMe"])

    wait_until(reads_from_nvme, BACK_S, "something comes from NVMe again")
    back_s = time.monotonic() - up
    seen = reader.round()
    say(f"link whole: hits from NVMe after {back_s:.1f} s; then {dict(seen)}")
    assert seen["from NVMe"] + seen["from DRAM"] == OBJECTS
    assert totals(reader.node)["bad_copies"] == 0


def push_all(engine: StreamingEngine) -> None:
    """What is refused, because what is in DRAM is not on NVMe yet, is offered again."""
    waiting = dict(enumerate(PROMPTS))

    def pushed() -> bool:
        for number, keys in list(waiting.items()):
            if engine.put(keys) == keys:
                del waiting[number]
        return not waiting

    wait_until(pushed, 120, "all is pushed")


def totals(node: RunningNode) -> dict[str, Any]:
    return dict(node.stats()["store"]["totals"])
