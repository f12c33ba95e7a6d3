"""A store in virtual time, small enough that every page counts: pages of 4 KiB, chunks of two and a half of them."""

from collections.abc import Iterable, Mapping

from kvstore.core import Key, Manifest, MissReason, Tier
from kvstore.policy import Policy, PrefixLru
from kvstore.store import Store
from kvstore.wire import (
    Acquire,
    AcquireAnswer,
    ClientId,
    CommitItem,
    Committed,
    Drop,
    Exists,
    Generation,
    Granted,
    LeaseId,
    Miss,
    Release,
    ReserveAnswer,
    ReserveItem,
)
from tests.support.answers import received

PAGE_BYTES = 4096
MANIFEST = Manifest(
    weights="weights",
    model={},
    kv_dtype="bfloat16",
    tile_format="test",
    chunk_tokens=40,
    unit_tokens=1,
    lanes=((2, 2, 64),),
)
NAMESPACE = MANIFEST.namespace
TOKEN_BYTES = MANIFEST.geometry.bytes_per_unit
CHUNK_BYTES = MANIFEST.geometry.object_bytes(MANIFEST.chunk_tokens)
CHUNK_PAGES = 3
PAGE_TOKENS = PAGE_BYTES // TOKEN_BYTES
TABLE = bytes(range(8 * MANIFEST.geometry.num_runs))

ANN, BOB, CAT = (ClientId(name * 16) for name in (b"a", b"b", b"c"))


def key_of(name: str) -> Key:
    """A key that can be told from others at a glance."""
    return Key(name.encode().ljust(32, b"."))


def lease_of(name: str) -> LeaseId:
    return LeaseId(name.encode().ljust(16, b"."))


def items(names: Iterable[str], size_bytes: int = CHUNK_BYTES, *, cold: bool = False) -> list[ReserveItem]:
    """A chain: each name's parent is the one before it."""
    chain: list[ReserveItem] = []
    parent = Key(NAMESPACE)
    for depth, name in enumerate(names):
        chain.append(ReserveItem(key_of(name), parent, depth, size_bytes, cold))
        parent = key_of(name)
    return chain


class World:
    """A store, its clock, and short words for what clients do; the books are audited after each of them."""

    def __init__(self, pages: int = 60, policy: Policy | None = None) -> None:
        self.now_s = 1000.0
        self.store = Store(pages, PAGE_BYTES, policy or PrefixLru(), lambda: self.now_s)
        self.advice = self.store.open_namespace(NAMESPACE, MANIFEST.encode())
        self.dirty: list[Key] = []
        self.store.on_dirty = self.dirty.append

    def reserve(
        self,
        client: ClientId,
        names: Iterable[str],
        size_bytes: int = CHUNK_BYTES,
        *,
        cold: bool = False,
        duration_s: float = 30.0,
    ) -> list[ReserveAnswer]:
        answers = self.store.reserve(client, NAMESPACE, items(names, size_bytes, cold=cold), duration_s)
        self.store.audit()
        return list(answers)

    def commit(
        self, client: ClientId, grants: Mapping[str, ReserveAnswer], table: bytes = TABLE
    ) -> list[object]:
        batch = [CommitItem(key_of(name), generation_of(grant), table) for name, grant in grants.items()]
        answers = self.store.commit(client, NAMESPACE, batch)
        self.store.audit()
        return list(answers)

    def abort(self, client: ClientId, name: str, grant: ReserveAnswer, *, quiet: bool) -> None:
        self.store.abort(client, NAMESPACE, [(key_of(name), generation_of(grant))], quiet)
        self.store.audit()

    def put(
        self, client: ClientId, names: Iterable[str], size_bytes: int = CHUNK_BYTES, *, cold: bool = False
    ) -> None:
        """Reserves and commits a chain, all of which must succeed."""
        grants = dict(zip(names, self.reserve(client, names, size_bytes, cold=cold), strict=True))
        new = {name: grant for name, grant in grants.items() if not isinstance(grant, Exists)}
        assert self.commit(client, new) == [Committed()] * len(new)

    def acquire(
        self,
        client: ClientId,
        names: Iterable[str],
        lease: str = "lease",
        *,
        duration_s: float = 30.0,
        prefix: bool = True,
    ) -> list[AcquireAnswer]:
        keys = tuple(map(key_of, names))
        request = Acquire(NAMESPACE, keys, lease_of(lease), duration_s, prefix=prefix)
        answers = received(self.store.acquire(client, request))
        self.store.audit()
        return list(answers)

    def release(self, client: ClientId, lease: str = "lease", names: str = "", *, cold: bool = False) -> None:
        self.store.release(client, Release(lease_of(lease), tuple(map(key_of, names)), cold))
        self.store.audit()

    def drop(self, names: Iterable[str]) -> None:
        self.store.drop(CAT, Drop(NAMESPACE, tuple(map(key_of, names))))
        self.store.audit()

    def look(self, names: Iterable[str]) -> str:
        """What is there, one letter for each key: its own when ready, `~` when filling, else `-`. Uses nothing."""
        views, _ = self.store.objects(1000)
        states = {view.key: view.tiers[Tier.DRAM] for view in views}
        letters = {name: {"ready": name, "filling": "~"} for name in names}
        return "".join(letters[name].get(states.get(key_of(name).hex(), ""), "-") for name in letters)

    def after(self, seconds: float) -> None:
        """Time passes, and the node notices."""
        self.now_s += seconds
        self.store.tick()
        self.store.audit()

    @property
    def free_pages(self) -> int:
        return self.store.snapshot().tiers[Tier.DRAM].free_pages

    @property
    def held_pages(self) -> int:
        return self.store.snapshot().tiers[Tier.DRAM].held_pages


def generation_of(grant: object) -> Generation:
    assert isinstance(grant, Granted), grant
    return grant.generation


def reason_of(answer: object) -> MissReason:
    assert isinstance(answer, Miss), answer
    return answer.reason
