"""Redis loses, lies, stalls and dies: no error at any client, no wrong byte, hits come back by themselves.

Two nodes and one engine that prefers the first; half of the objects are on each. Whatever is done to Redis,
nobody touches a node or the engine afterwards.

Mutants that must fail here: a publisher without regular passes; a heartbeat that does not notice a loss; a client
that waits for Redis before it asks its own node; a reader that believes what Redis says.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from kvstore.core import Key
from tests.faults.conftest import SOAK
from tests.faults.slow import SlowProxy
from tests.faults.support import HOUSE, ArenaWindow, Engine, chain, fill, shape
from tests.support import RedisServer, wait_until
from tests.support.node import RunningNode, running_node

pytestmark = pytest.mark.process

OBJECT_BYTES = PAGE_BYTES = 4096
CHAIN = 100
CHAINS = 100 if SOAK else 20
OBJECTS = CHAIN * CHAINS
BACK_S = 60.0
BACK_SHARE = 0.99
MANIFEST = shape(OBJECT_BYTES, "redis")


class Raw:
    """What somebody else might do to the index. An entry is a version byte, then node id (8 bytes) and more."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def names(self) -> list[bytes]:
        """Names of the entries of keys."""
        found: Any = self.client.keys("kv:{*}*")
        return sorted(name for name in found if b"fence" not in name)

    def values(self, names: Sequence[bytes]) -> dict[bytes, bytes]:
        found: Any = self.client.mget(names)
        return dict(zip(names, found, strict=True))

    def write(self, values: dict[bytes, bytes]) -> None:
        written: Any = values
        self.client.mset(written)

    def delete(self, names: Sequence[bytes]) -> None:
        assert self.client.delete(*names) == len(names)

    def misdirect(self, names: Sequence[bytes]) -> None:
        """From now on the other node is said to hold these keys."""

        def ids() -> Any:
            return self.client.zrange("kv:nodes", 0, -1)

        wait_until(lambda: len(ids()) == 2, 10, "both nodes have announced themselves")
        first, second = ids()
        other = {first: second, second: first}
        self.write({name: v[:1] + other[v[1:9]] + v[9:] for name, v in self.values(names).items()})


class House:
    """A Redis behind a proxy, two nodes, an engine of the first one, and what is stored."""

    def __init__(
        self, server: RedisServer, proxy: SlowProxy, nodes: Sequence[RunningNode], engine: Engine
    ) -> None:
        self.server = server
        self.proxy = proxy
        self.nodes = nodes
        self.engine = engine
        chains = [chain(MANIFEST.namespace, CHAIN, seed) for seed in range(CHAINS)]
        self.local, self.remote = chains[::2], chains[1::2]
        self.missed_again = 0

    def hit_rate(self, chains: Sequence[Sequence[Key]]) -> float:
        """Of the objects of these chains: each is pulled and compared."""
        return sum(self.engine.get(keys) for keys in chains) / (CHAIN * len(chains))

    def everything(self) -> float:
        return self.hit_rate([*self.local, *self.remote])

    def comes_back(self) -> float:
        """Seconds until the hit rate is what it was; it was 1."""
        began_s = time.monotonic()
        wait_until(lambda: self.uses_the_index() and self.everything() >= BACK_SHARE, BACK_S, "hits are back")
        return time.monotonic() - began_s

    def uses_the_index(self) -> bool:
        """Else it asks the nodes that it remembers, and finds there what the index does not say."""
        return self.engine.client.stats.index_reachable

    def losses(self) -> int:
        return sum(int(node.stats()["publisher"]["losses"]) for node in self.nodes)

    @contextlib.contextmanager
    def raw(self) -> Iterator["Raw"]:
        with self.server.client() as client:
            yield Raw(client)


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("redis-faults")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(folder))
        proxy = stack.enter_context(SlowProxy(server.port))
        nodes = [
            stack.enter_context(
                running_node(
                    tmp_path_factory.mktemp(name),
                    node_id=name,
                    redis_url=f"redis://127.0.0.1:{proxy.port}/0",
                    dram_size_bytes="64MiB",
                    dram_page_bytes=PAGE_BYTES,
                )
            )
            for name in ("first", "second")
        ]
        engine = stack.enter_context(Engine(nodes[0].control, MANIFEST))
        made = House(server, proxy, nodes, engine)
        for node, chains in zip(nodes, (made.local, made.remote), strict=True):
            with Engine(node.control, MANIFEST) as writer, ArenaWindow(node, PAGE_BYTES) as arena:
                for keys in chains:
                    fill(writer, arena, keys)
        yield made


@pytest.fixture
def whole(house) -> House:
    """The house as it should be, whatever was done to it before."""
    wait_until(lambda: house.uses_the_index() and house.everything() == 1.0, BACK_S, "everything hits")
    return house


def test_lost_and_lying_entries_are_put_right(whole) -> None:
    with whole.raw() as raw:
        names = raw.names()
        assert len(names) == OBJECTS
        chosen = HOUSE.sample(names, OBJECTS * 15 // 100)
        raw.delete(chosen[: OBJECTS // 10])
        raw.misdirect(chosen[OBJECTS // 10 :])
    left = whole.everything()
    assert left < 0.9, "nothing was missed: the fault did not hit"
    print(f"hit rate {left:.3f} at first, back after {whole.comes_back():.1f} s")
    with whole.raw() as raw:
        assert len(raw.names()) == OBJECTS


def flush(house: House) -> None:
    house.server.flush()


def kill_and_restart(house: House) -> None:
    house.server.restart()


def restore_an_old_dump(house: House) -> None:
    """From a time when a quarter of the entries was not there, and another one named the wrong node."""
    dump, old = house.server.folder / "dump.rdb", house.server.folder / "old.rdb"
    with house.raw() as raw:
        names = raw.names()
        values = raw.values(names)
        raw.delete(names[::4])
        raw.misdirect(names[1::4])
        raw.client.save()
        raw.write(values)
    shutil.copy(dump, old)
    house.engine.put(chain(MANIFEST.namespace, 2, HOUSE.randrange(1 << 30)))
    wait_until(lambda: house.everything() == 1.0, BACK_S, "nodes have written since")
    house.server.kill()
    shutil.copy(old, dump)
    house.server.restart()
    dump.unlink()
    assert house.everything() < 0.9, "nothing was missed: the dump was not old"


@pytest.mark.parametrize("fault", [flush, kill_and_restart, restore_an_old_dump], ids=lambda f: f.__name__)
def test_a_redis_that_forgot_is_filled_again(fault: Callable[[House], None], whole) -> None:
    before = whole.losses()
    fault(whole)
    wait_until(lambda: whole.losses() > before, 30, "the nodes have noticed")
    print(f"back after {whole.comes_back():.1f} s")


def test_while_redis_is_down_the_own_node_hits(whole) -> None:
    whole.server.kill()
    try:
        began_s = time.monotonic()
        assert whole.hit_rate(whole.local) == 1.0
        whole.hit_rate(whole.remote)  # of what the own node does not hold the index is asked
        assert whole.hit_rate(whole.local) == 1.0
        assert time.monotonic() - began_s < 30
        assert whole.engine.client.stats.index_breaker_opened > 0
        assert whole.engine.put(chain(MANIFEST.namespace, 3, 10_000)) != []
    finally:
        whole.server.restart()
    whole.comes_back()


def test_a_redis_that_answers_after_two_seconds_costs_hits_only(whole) -> None:
    opened, delayed = whole.engine.client.stats.index_breaker_opened, whole.proxy.delayed
    whole.proxy.reply_delay_s = 2.0
    try:
        for keys in (*whole.local, *whole.remote, *whole.local):  # of the own node's the index is not asked
            began_s = time.monotonic()
            assert whole.engine.get(keys) == CHAIN or keys in whole.remote
            assert time.monotonic() - began_s < 3.0
        assert whole.engine.client.stats.index_breaker_opened > opened
        assert whole.proxy.delayed > delayed, "nothing was slow"
    finally:
        whole.proxy.reply_delay_s = 0.0
    whole.comes_back()
