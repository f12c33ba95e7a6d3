"""A node that pretends to have an NVMe tier: what it is told to keep there it answers as a real one would.

The bytes are in DRAM all the time; only the answers to Acquire and Pages say otherwise. So there is no device, and
every trouble can be planned. Whoever waits for a promotion is told to look again soon, all the time.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvstore.core import Key, MissReason
from kvstore.store import Store
from kvstore.wire import Acquire, AcquireAnswer, ClientId, Miss, OnDisk, Pages, Release, Resident
from tests.support.answers import received
from tests.support.control_node import ControlNode

LOOK_S = 0.005


@dataclass
class Disk:
    """What is pretended.

    `on_disk` are the keys; `room` is how many of them DRAM holds at a time; `silent` is how many questions go by
    before a promotion has ended; `faults` are answers in the place of a promotion.
    """

    on_disk: set[Key] = field(default_factory=set)
    room: int = 1_000
    silent: int = 0
    faults: dict[Key, MissReason] = field(default_factory=dict)
    in_dram: set[Key] = field(default_factory=set)
    most_in_dram: int = 0
    asked: list[tuple[Key, ...]] = field(default_factory=list)
    hints: list[Key] = field(default_factory=list)
    _age: dict[Key, int] = field(default_factory=dict)

    def answer(self, key: Key, resident: AcquireAnswer) -> AcquireAnswer:
        """What Acquire says of a key that the store holds."""
        if key not in self.on_disk or key in self.in_dram or not isinstance(resident, Resident):
            return resident
        return OnDisk(resident.generation, resident.size_bytes, 0.25)

    def promote(self, key: Key, resident: AcquireAnswer) -> AcquireAnswer:
        """What Pages says of it."""
        if key in self.faults:
            return Miss(self.faults[key])
        age = self._age.get(key, 0)
        if key in self.on_disk and key not in self.in_dram and len(self.in_dram) < self.room:
            self._age[key] = age + 1
            if age >= self.silent:
                self.in_dram.add(key)
                self.most_in_dram = max(self.most_in_dram, len(self.in_dram))
        return self.answer(key, resident)


class DiskStore:
    """A store seen through `disk`."""

    def __init__(self, store: Store, disk: Disk) -> None:
        self._store = store
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def acquire(self, client: ClientId, request: Acquire) -> tuple[AcquireAnswer, ...]:
        answers = received(self._store.acquire(client, request))
        return tuple(self._disk.answer(*one) for one in zip(request.keys, answers, strict=False))

    def watch_leased(self, _: Sequence[Key], callback: Callable[[], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_later(LOOK_S, callback).cancel

    def pages(self, client: ClientId, request: Pages, _: float | None = None) -> tuple[AcquireAnswer, ...]:
        self._disk.asked.append(request.keys)
        answers = received(self._store.pages(client, msgspec.structs.replace(request, wait_s=0.0)))
        return tuple(self._disk.promote(*one) for one in zip(request.keys, answers, strict=True))

    def release(self, client: ClientId, request: Release) -> None:
        self._store.release(client, request)
        self._disk.in_dram -= set(request.keys) or self._disk.in_dram

    def prefetch(self, client: ClientId, request: Any) -> None:
        self._disk.hints += request.keys


class DiskNode(ControlNode):
    """A `ControlNode` with a `disk`."""

    disk: Disk

    async def start(self) -> None:
        self.disk = Disk()
        await super().start()
        calls = self.server._calls
        calls._store = DiskStore(calls._store, self.disk)  # type: ignore[assignment]
