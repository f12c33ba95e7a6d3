"""A node with an NVMe tier, as engines see it: more than DRAM holds, and what is still there after a restart."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvstore.core import Key
from kvstore.tiers import FileDevice, NvmeConfig, NvmeDevice, read_label
from tests.faults.streaming import StreamingEngine
from tests.faults.support import chain, shape
from tests.support import RedisServer, wait_until
from tests.support.node import RunningNode, running_node

pytestmark = pytest.mark.process

MODEL = shape(256 << 10)
KEYS = chain(MODEL.namespace, 256, 1)  # 64 MiB: four times the arena


def push_all(engine: StreamingEngine, keys: list[Key]) -> None:
    """A slow push: what is refused is offered again."""

    def pushed() -> bool:
        first = next((at for at, key in enumerate(keys) if key not in stored), len(keys))
        stored.update(engine.put(keys[first : first + 8]))
        return len(stored) == len(keys)

    stored: set[Key] = set()
    wait_until(pushed, deadline_s=60.0, what="the push")


def settings(folder: Path, **more: object) -> dict[str, object]:
    return {
        "nvme_path": folder / "device",
        "nvme_size_bytes": "256MiB",
        "node_id": "n1",
        "dram_size_bytes": "16MiB",
        "dram_page_bytes": "64KiB",
        "nvme_deadline_s": 60.0,  # a disk that is shared with the rest of CI may be slow, and is not down
        **more,
    }


def totals(node: RunningNode) -> dict[str, Any]:
    return node.stats()["store"]["totals"]


def where(node: RunningNode) -> dict[str, dict[str, str]]:
    status, text = node.get("/v1/objects?limit=1000")
    assert status == 200
    return {each["key"]: each["tiers"] for each in json.loads(text)["objects"]}


def both(node: RunningNode) -> int:
    return sum(len(tiers) == 2 for tiers in where(node).values())


def test_what_was_acknowledged_is_in_a_tier_until_its_eviction_is_counted(tmp_path) -> None:
    """Four times the arena is pushed to a device of twice the arena."""
    small = settings(tmp_path, nvme_size_bytes="32MiB")
    with running_node(tmp_path, **small) as node, StreamingEngine(node.control, MODEL) as engine:
        for start in range(0, len(KEYS), 32):
            push_all(engine, KEYS[start : start + 32])
            wait_until(lambda end=start + 32: totals(node)["committed"] == end)  # type: ignore[misc]
            held = where(node)
            assert len(held) + totals(node)["evicted"] >= start + 32
        wait_until(lambda: node.stats()["store"]["moving"] == 0)
        wait_until(lambda: len(where(node)) + totals(node)["evicted"] == len(KEYS))
        counts = totals(node)
        assert counts["evicted"] > 50
        assert counts["orphaning"] == 0
        on_nvme = sum("nvme" in tiers for tiers in where(node).values())
        assert counts["spilled"] == on_nvme + counts["trimmed"] + counts["evicted"]


def objects_of(folder: Path) -> tuple[int, dict[bytes, list[int]]]:
    """The page size of a device that nobody uses, and where on it the pages of each object are."""

    async def look() -> tuple[int, dict[bytes, list[int]]]:
        path = str(folder / "device")
        device = FileDevice.open(path)
        label = read_label(device)
        device.close()
        used = NvmeDevice(NvmeConfig(path=path, node="n1", catalogs=folder / "device.catalog"))
        await used.start()
        records = dict(used.records)
        await used.stop()
        pages = {
            key: [at for start, count in record.extents for at in range(start, start + count)]
            for key, record in records.items()
        }
        return label.page_bytes, {
            key: [label.data_offset + at * label.page_bytes for at in each] for key, each in pages.items()
        }

    return asyncio.run(look())


def test_exactly_the_damaged_objects_miss_whatever_became_of_the_catalog(tmp_path) -> None:
    """Flips, zeroed pages, swapped pages; then the catalog is garbage, then it is gone."""
    keys = KEYS[:60]
    with running_node(tmp_path, **settings(tmp_path)) as node, StreamingEngine(node.control, MODEL) as engine:
        push_all(engine, keys)
        assert node.stop() == 0
    page_bytes, pages = objects_of(tmp_path)
    assert pages.keys() == set(keys)
    flipped, zeroed, one, other = keys[3], keys[17], keys[31], keys[44]
    with open(tmp_path / "device", "r+b", buffering=0) as file:
        file.seek(pages[flipped][0] + 77)
        byte = file.read(1)[0]
        file.seek(pages[flipped][0] + 77)
        file.write(bytes([byte ^ 4]))
        file.seek(pages[zeroed][-1])
        file.write(bytes(page_bytes))
        contents = []
        for key in (one, other):
            file.seek(pages[key][1])
            contents.append(file.read(page_bytes))
        for key, content in zip((other, one), contents, strict=True):
            file.seek(pages[key][1])
            file.write(content)
    damaged = {flipped, zeroed, one, other}
    (data,) = (tmp_path / "device.catalog").glob("*/data.mdb")
    data.write_bytes(os.urandom(data.stat().st_size))
    with running_node(tmp_path, **settings(tmp_path)) as node, StreamingEngine(node.control, MODEL) as engine:
        assert "made anew from the records" in node.process.output()
        assert "60 objects found on it" in node.banner
        missed = {key for key in keys if engine.stream([key]).got == 0}
        assert missed == damaged
        wait_until(lambda: totals(node)["bad_copies"] == len(damaged))
        node.kill()
    shutil.rmtree(tmp_path / "device.catalog")
    with running_node(tmp_path, **settings(tmp_path)) as node, StreamingEngine(node.control, MODEL) as engine:
        assert sum(engine.stream([key]).got for key in keys) == len(keys) - len(damaged)


def test_a_prompt_of_four_times_the_arena_is_pushed_and_streams_back_and_survives_a_restart(tmp_path) -> None:
    with running_node(tmp_path, **settings(tmp_path)) as node, StreamingEngine(node.control, MODEL) as engine:
        push_all(engine, KEYS)
        wait_until(lambda: totals(node)["committed"] == len(KEYS))
        assert totals(node)["evicted"] == 0
        wait_until(lambda: node.stats()["store"]["moving"] == 0)
        counts, tiers = totals(node), node.stats()["store"]["tiers"]
        assert counts["spilled"] == tiers["nvme"]["objects"]
        assert counts["spilled"] == counts["demoted"] + both(node)
        done = engine.stream(KEYS[:200])
        assert done.got == 200, done
        assert done.from_nvme > 100
        assert node.stop() == 0
        assert "could not be flushed" not in node.process.output(), node.process.output()
    with (
        RedisServer(tmp_path) as redis,
        redis.client() as index,
        running_node(tmp_path, **settings(tmp_path, redis_url=redis.url)) as node,
        StreamingEngine(node.control, MODEL) as engine,
    ):
        assert f"{len(KEYS)} objects found on it" in node.banner, node.process.output()
        assert len(index.keys("kv:{*")) == len(KEYS), (
            "it says that it is ready before engines can find what it has"
        )
        done = engine.stream(KEYS)
        assert (done.got, done.from_nvme, done.bad) == (len(KEYS), len(KEYS), 0), done
