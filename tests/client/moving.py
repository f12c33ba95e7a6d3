"""A node's arena without a node, and objects to move to and from it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from kvstore.client import NodeAddress, PullItem, PushItem
from kvstore.core import Extent, Extents, Part, Run, Span, checksums, pages_for
from kvstore.transfer import InProcessNetwork, InProcessTransfer
from kvstore.wire import BootId, NodeId
from tests.contracts.transfer_memory import Memory

PAGE = 4096


def whole(size_bytes: int, runs: int = 4) -> Part:
    """A part that is a whole object of this size, in about equal runs."""
    bounds = [size_bytes * n // runs for n in range(runs + 1)]
    cut = tuple(Run(n, bounds[n], bounds[n + 1] - bounds[n]) for n in range(runs))
    return Part((Span(0, size_bytes),), cut, size_bytes)


@dataclass
class Object:
    """Bytes with a table, and pages of an arena."""

    data: bytes
    extents: Extents
    part: Part
    table: bytes

    def push(self, source: Callable[[memoryview], None] | int | None = None) -> PushItem:
        return PushItem(self.extents, len(self.data), self.part, self.fill if source is None else source)

    def pull(self, sink: Callable[[memoryview], None] | int) -> PullItem:
        return PullItem(self.extents, len(self.data), self.part, self.table, sink)

    def fill(self, view: memoryview) -> None:
        view[:] = self.data

    def of(self, part: Part) -> "Object":
        """The same object, seen by a rank."""
        return replace(self, part=part)


@dataclass
class Got:
    """A sink that keeps copies of what it was given."""

    seen: list[bytes] = field(default_factory=list)

    def __call__(self, view: memoryview) -> None:
        self.seen.append(bytes(view))


class Arena:
    """Pages behind an in-process segment, or behind another's memory."""

    def __init__(self, memory: Memory, address: NodeAddress, seed: int = 0) -> None:
        self.memory = memory
        self.address = address
        self.random = Random(seed)
        self.free = list(range(memory.size_bytes // PAGE))

    @classmethod
    def in_process(cls, network: InProcessNetwork, pages: int = 256) -> "Arena":
        memory, transfer = Memory(pages * PAGE), InProcessTransfer(network)
        transfer.register(memory.address, memory.size_bytes)
        return cls(memory, node_at(transfer.protocol, transfer.segment, memory.address))

    def allocate(self, size_bytes: int) -> Extents:
        """Pages from all over the arena; neighbours become one extent."""
        extents: list[Extent] = []
        while (left := pages_for(size_bytes, PAGE) - sum(e.page_count for e in extents)) > 0:
            start = self.random.choice(self.free)
            count = 0
            while count < left and start + count in self.free and self.random.random() < 0.8:
                self.free.remove(start + count)
                count += 1
            if count:
                extents.append(Extent(start, count))
        return tuple(extents)

    def object(self, size_bytes: int, part: Part | None = None, stored: bool = False) -> Object:
        """A new object with pages here; `stored`: its bytes are in them."""
        data, part = self.random.randbytes(size_bytes), part or whole(size_bytes)
        made = Object(data, self.allocate(size_bytes), part, checksums(memoryview(data), part.runs))
        if stored:
            self.put(made)
        return made

    def put(self, stored: Object) -> None:
        """The object's bytes into its pages, page by page, with no help from what is tested."""
        for n, page in enumerate(self.pages(stored.extents)):
            data = stored.data[n * PAGE : (n + 1) * PAGE]
            self.memory[page * PAGE : page * PAGE + len(data)] = data

    def get(self, stored: Object) -> bytes:
        """What its pages hold."""
        pages = [self.memory[page * PAGE : (page + 1) * PAGE] for page in self.pages(stored.extents)]
        return b"".join(pages)[: len(stored.data)]

    def flip(self, at_byte: int) -> None:
        """Damages one bit of the arena."""
        (byte,) = self.memory[at_byte : at_byte + 1]
        self.memory[at_byte : at_byte + 1] = bytes([byte ^ 4])

    @staticmethod
    def pages(extents: Extents) -> list[int]:
        return [start + n for start, count in extents for n in range(count)]


def node_at(protocol: str, segment: str, arena_base: int) -> NodeAddress:
    """A node that is reached like this."""
    return NodeAddress(NodeId(b"testnode"), BootId(b"testboot"), "", {protocol: segment}, arena_base, PAGE)
