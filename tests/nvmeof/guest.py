"""What runs in the machine: the NVMe tier on `/dev/nvmeXn1` over TCP, alone and in a node, before, during and after
a cut of the link.

Each step ends with counters that show that it happened.
"""

import asyncio
import hashlib
import json
import random
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_digest

from kvstore.cli import main as kvstore
from kvstore.core import Key, KVStoreError, Manifest
from kvstore.tiers import DeviceDown, NewObject, NvmeConfig, NvmeDevice, NvmeTier, Placed, Refusal, aligned
from kvstore.wire import Generation
from tests.nvmeof import node
from tests.nvmeof.network import NQN, THERE, Link, load, run, serve
from tests.support import wait_until, wait_until_async

BEGAN = time.monotonic()
OBJECTS = 48
DEADLINE_S = 3.0
MARGIN_S = 1.0
CUT_S = 15.0  # longer than the kernel takes to fail what is on its way
BACK_S = 30.0
NODE = "node-in-a-machine"
CATALOGS = Path("/run/catalogs")
CONFIG = Path("/run/kvstore.toml")
ATTACH, DETACH = "/repository/deploy/nvmeof/attach.sh", "/repository/deploy/nvmeof/detach.sh"
HOST_ID = "11111111-2222-3333-4444-555555555555"
HOST = ("--hostnqn", f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}", "--hostid", HOST_ID)
MANIFEST = Manifest(
    weights="w",
    model={},
    kv_dtype="bf16",
    tile_format="t",
    chunk_tokens=256,
    unit_tokens=1,
    lanes=((2, 2, 1024),),
)
OBJECT_BYTES = MANIFEST.geometry.object_bytes(256)  # 1 MiB, four runs
RUN_BYTES = OBJECT_BYTES // 4


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


# --- the device ---------------------------------------------------------------------------------------


def attach_with_defaults() -> str:
    """As somebody would who knows no better."""
    run("nvme", "connect", "-t", "tcp", "-a", THERE, "-s", "4420", "-n", NQN, *HOST)
    return wait_until(lambda: next((f"/dev/{each.name}" for each in Path("/dev").glob("nvme?n1")), ""))


def check(path: str) -> dict[str, Any]:
    """What `kvstore check` finds about the link to a device."""
    CONFIG.write_text(
        f'[node]\nid = "{NODE}"\n[dram]\nsize_bytes = "64MiB"\n'
        f'[[nvme]]\npath = "{path}"\ncatalog_folder = "{CATALOGS}"\n'
    )
    said = StringIO()
    with redirect_stdout(said):
        kvstore(["check", "--config", str(CONFIG), "--json", "--no-transfer"])
    (found,) = [f for f in json.loads(said.getvalue())["findings"] if f["subject"] == f"link of {path}"]
    say(f"kvstore check: {found['state']}: {found['subject']}: {found['text']} {found['remedy']}".rstrip())
    return dict(found)


def settings() -> str:
    """The time-outs of the controller, as the kernel has them."""
    (folder,) = [
        each for each in Path("/sys/class/nvme").iterdir() if (each / "subsysnqn").read_text().strip() == NQN
    ]
    names = ("transport", "state", "kato", "reconnect_delay", "fast_io_fail_tmo", "ctrl_loss_tmo")
    return " ".join(f"{name}={(folder / name).read_text().strip()}" for name in names)


# --- objects ------------------------------------------------------------------------------------------


def content(number: int) -> memoryview:
    memory = aligned(OBJECT_BYTES)
    memory[:] = random.Random(number).randbytes(4096) * (OBJECT_BYTES // 4096)
    return memory


def new_object(number: int, memory: memoryview) -> NewObject:
    table = b"".join(xxh3_64_digest(memory[at : at + RUN_BYTES]) for at in range(0, OBJECT_BYTES, RUN_BYTES))
    key = Key(hashlib.sha256(b"%d" % number).digest())
    return NewObject(key, MANIFEST.namespace, key, 0, Generation(key[:8]), OBJECT_BYTES, False, table)


def tier_on(path: str) -> NvmeTier:
    config = NvmeConfig(path=path, node=NODE, catalogs=CATALOGS, threads=8, deadline_s=DEADLINE_S)
    return NvmeTier([NvmeDevice(config)])


class Call(NamedTuple):
    """A call of the load: when it began and ended, and what became of it."""

    began_s: float
    ended_s: float
    outcome: str


class Load:
    """Readers and a writer that never pause for longer than a moment, and what they saw."""

    def __init__(self, tier: NvmeTier) -> None:
        self.tier = tier
        self.calls: list[Call] = []
        self.late_s = 0.0
        self._ended = False

    async def __aenter__(self) -> "Load":
        work = [self._read(seed) for seed in range(4)] + [self._write(), self._tick()]
        self._tasks = [asyncio.create_task(each) for each in work]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = True
        await asyncio.gather(*self._tasks)

    def between(self, from_s: float, to_s: float) -> list[Call]:
        """Calls that were under way in this time."""
        return [call for call in self.calls if call.ended_s > from_s and call.began_s < to_s]

    async def _read(self, seed: int) -> None:
        rng, memory = random.Random(seed), aligned(OBJECT_BYTES)
        while not self._ended:
            number = rng.randrange(OBJECTS)
            began = time.monotonic()
            outcome, ended = await get(self.tier, number, memory)
            self.calls.append(Call(began, time.monotonic(), outcome))
            if ended is not None:
                await asyncio.wait({ended})  # the memory is in use until then: a node would take other pages
            await pause(0.01)

    async def _write(self) -> None:
        number = OBJECTS
        while not self._ended:
            number += 1
            memory = content(number)
            began = time.monotonic()
            try:
                placed = await self.tier.put(new_object(number, memory), [memory])
            except DeviceDown:
                outcome = "put failed"
            else:
                outcome = "put" if isinstance(placed, Placed) else f"put refused: {placed}"
            self.calls.append(Call(began, time.monotonic(), outcome))
            await pause(0.05)

    async def _tick(self) -> None:
        """How late the loop turns: nothing about the device may hold it up."""
        while not self._ended:
            due = time.monotonic() + 0.05
            await pause(0.05)
            self.late_s = max(self.late_s, time.monotonic() - due)


async def pause(seconds: float) -> None:
    """The load's pace."""
    due_s = time.monotonic() + seconds
    await wait_until_async(lambda: time.monotonic() >= due_s)


async def get(tier: NvmeTier, number: int, memory: memoryview) -> tuple[str, "asyncio.Future[bytes] | None"]:
    """Hit, or why not; and what ends when the memory is free, if that is later."""
    device = tier.devices[0]
    record = device.records[Key(hashlib.sha256(b"%d" % number).digest())]
    try:
        reading = device.get(record, [memory])
    except DeviceDown:
        return "miss at once", None
    try:
        await reading.table
    except DeviceDown:
        return "miss", reading.ended
    return ("hit" if memory == content(number) else "WRONG BYTES"), None


async def all_hit(tier: NvmeTier) -> int:
    memory = aligned(OBJECT_BYTES)
    return [(await get(tier, number, memory))[0] for number in range(OBJECTS)].count("hit")


# --- the story ----------------------------------------------------------------------------------------


async def spill(path: str) -> None:
    tier = tier_on(path)
    await tier.start()
    tier.open_namespace(MANIFEST.namespace, MANIFEST.encode())
    for number in range(OBJECTS):
        memory = content(number)
        placed = await tier.put(new_object(number, memory), [memory])
        assert not isinstance(placed, Refusal), placed
    stats = tier.devices[0].stats()
    await tier.stop()
    say(
        f"spilled: {stats.counts.puts} objects, {stats.counts.put_bytes >> 20} MiB, {stats.counts.failed_puts} failed"
    )
    assert stats.counts.puts == OBJECTS


async def story(path: str, link: Link) -> None:
    tier = tier_on(path)
    await tier.start()
    device = tier.devices[0]
    found = len(device.records)
    hits = await all_hit(tier)
    say(f"restarted: {found} objects found, {hits} hits, every byte as it was written")
    assert found == hits == OBJECTS
    tier.open_namespace(MANIFEST.namespace, MANIFEST.encode())
    async with Load(tier) as load_:
        await wait_until_async(lambda: len(load_.calls) > 50, 60)
        await cut(link, load_, device)
        await back(link, load_, device)
    hits = await all_hit(tier)
    tier.audit()
    stats = device.stats()
    say(
        f"after the load: {hits} of {OBJECTS} hits, {stats.counts.gets} gets, {stats.counts.failed_gets} failed, "
        f"{stats.counts.puts} puts, {stats.counts.failed_puts} failed, {stats.counts.bad_copies} bad copies, "
        f"{stats.trips} trips of the breaker; loop at most {load_.late_s * 1e3:.0f} ms late"
    )
    assert hits == OBJECTS
    assert not [call for call in load_.calls if call.outcome == "WRONG BYTES"]
    assert stats.counts.bad_copies == 0
    await tier.stop()


async def cut(link: Link, load_: Load, device: NvmeDevice) -> None:
    """The link is silent: calls fail within the deadline, later ones at once."""
    before, down_s = Counter(call.outcome for call in load_.calls), time.monotonic()
    link.down()
    await wait_until_async(lambda: time.monotonic() > down_s + CUT_S, CUT_S + 5)
    calls = load_.between(down_s, time.monotonic())
    seen = Counter(call.outcome for call in calls)
    longest_s = max(call.ended_s - max(call.began_s, down_s) for call in calls)
    say(f"before the cut: {dict(before)}")
    say(
        f"cut for {CUT_S:g} s: {dict(seen)}; the longest call took {longest_s:.2f} s (deadline {DEADLINE_S:g} s); "
        f"{device.health.reason}; {settings()}"
    )
    assert seen["miss"] + seen["put failed"] >= 1, "nothing was under way when the link was cut"
    assert seen["miss at once"] >= 10, "the breaker did not open"
    assert longest_s <= DEADLINE_S + MARGIN_S, "a caller waited"
    assert not device.health.up
    assert device.health.trips == 1


async def back(link: Link, load_: Load, device: NvmeDevice) -> None:
    """The link is whole: the tier comes back by itself."""
    up_s = time.monotonic()
    link.up()
    await wait_until_async(lambda: device.health.up, BACK_S, "the tier is back")
    back_s = time.monotonic()
    await wait_until_async(
        lambda: Counter(call.outcome for call in load_.between(back_s, time.monotonic()))["hit"] >= 20, BACK_S
    )
    seen = Counter(call.outcome for call in load_.between(back_s, time.monotonic()))
    say(f"link whole: the tier was back after {back_s - up_s:.1f} s; since then {dict(seen)}; {settings()}")


def main() -> None:
    """Everything, in order."""
    load("nvme-tcp", "nvmet", "nvmet-tcp", "veth")
    run("modprobe", "brd", "rd_nr=1", "rd_size=524288")
    link = Link()
    serve("/dev/ram0")
    path = attach_with_defaults()
    say(f"attached {path} with the kernel's defaults: {settings()}")
    assert check(path)["state"] == "warn"
    run(DETACH, NQN)
    wait_until(lambda: not Path(path).exists())
    path = run("env", f"HOST_NQN={HOST[1]}", f"HOST_ID={HOST_ID}", ATTACH, "tcp", THERE, NQN).strip()
    say(f"attached {path} with attach.sh: {settings()}")
    wait_until(Path(path).exists)
    assert check(path)["state"] == "ok"
    CATALOGS.mkdir()
    assert kvstore(["format", path, "--yes", "--node-id", NODE]) == 0
    asyncio.run(spill(path))
    asyncio.run(story(path, link))
    assert kvstore(["scrub", path, "--catalog-folder", str(CATALOGS)]) == 0
    node.story(path, NODE, CATALOGS, link, say)
    run(DETACH, NQN)
    say("passed")


if __name__ == "__main__":
    try:
        main()
    except KVStoreError as error:
        sys.exit(f"kvstore: {error}")
