"""The real client behind the scheduler half: a real node process, a real Redis, vLLM's real scheduler.

Only the bytes are the fake worker's: it keeps them by generation, as the node's pages would.
"""

import json
from collections.abc import Iterator

import pytest

from connector.background import Background
from connector.control import Grant, NotGranted, ReserveAsk
from kvstore.client import ClientConfig, Copy, OnDisk, Promise, Resident
from kvstore.core import Key, Manifest, MissReason, Tier, seal
from kvstore.wire import Generation, LeaseId
from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt
from tests.support import Process, wait_until
from tests.support.node import RunningNode, node_command, running_node

pytestmark = pytest.mark.process

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)
STORED = 3 * CHUNK + 2 * BLOCK
MANIFEST = Manifest(
    weights="w",
    model={},
    kv_dtype="float32",
    tile_format="t",
    chunk_tokens=16,
    unit_tokens=16,
    lanes=((1, 1, 64),),
)
WAIT_S = 10.0


@pytest.fixture(scope="module")
def node_process() -> Iterator[RunningNode]:
    with running_node() as node:
        yield node


@pytest.fixture
def control(node_process) -> Iterator[Background]:
    made = connect(node_process)
    yield made
    made.close()


def connect(node: RunningNode) -> Background:
    return Background(ClientConfig(node=node.control))


def drive(engine: Engine) -> None:
    """Steps until the engine is idle, in real time."""

    def idle() -> bool:
        if engine.scheduler.has_requests():
            engine.step()
        return not engine.scheduler.has_requests()

    wait_until(idle, WAIT_S, "an idle engine")


def generate(engine: Engine, name: str, text: list[int] = TEXT, **more) -> list[int]:
    engine.submit(name, text, **more)
    drive(engine)
    return engine.tokens[name]


def held(node: RunningNode) -> tuple[int, int]:
    store = node.stats()["store"]
    return store["leases"], store["reservations"]


def asks(seed: int, number: int = 2) -> list[ReserveAsk]:
    """Objects of a chain of their own."""
    keys = [Key(bytes([seed, n]) + bytes(30)) for n in range(number)]
    parents = [Key(MANIFEST.namespace), *keys]
    return [ReserveAsk(key, parents[n], n, 64, cold=False) for n, key in enumerate(keys)]


def stored(control: Background, seed: int) -> list[Key]:
    items = asks(seed)
    grants = control.reserve(items, 30.0).result(WAIT_S)
    granted = [grant for grant in grants if isinstance(grant, Grant)]
    assert len(granted) == len(items)
    assert control.commit([(grant, bytes(8)) for grant in granted]).result(WAIT_S) == [True, True]
    return [item.key for item in items]


# --- the contract of Control --------------------------------------------------------------------------


def test_what_is_committed_is_promised_until_it_is_released(control, node_process) -> None:
    control.open(MANIFEST)
    keys = stored(control, 1)
    promise = control.acquire([*keys, Key(bytes(32))], 30.0, 0.0, ()).result(WAIT_S)
    assert [promised.key for promised in promise.objects] == keys
    assert promise.reason is MissReason.NEVER_STORED
    assert promise.objects[0].table == seal(bytes(8)) and promise.objects[0].size_bytes == 64
    assert promise.objects[0].node.control == node_process.control
    assert control.renew(promise, 30.0).result(WAIT_S) > 25
    wait_until(lambda: held(node_process) == (1, 0), WAIT_S)
    control.release(promise)
    wait_until(lambda: held(node_process) == (0, 0), WAIT_S)


def cold(node: RunningNode, keys: list[Key]) -> list[bool]:
    listing = json.loads(node.get("/v1/objects?limit=1000")[1])["objects"]
    flags = {shown["key"]: shown["cold"] for shown in listing}
    return [flags[key.hex()] for key in keys]


def test_what_one_engine_has_consumed_is_cold_unless_another_uses_it(control, node_process) -> None:
    """Mutants: a consumed object is dropped, or is cold for everybody."""
    control.open(MANIFEST)
    keys = stored(control, 8)
    readers = [connect(node_process) for _ in range(3)]
    for reader, consumes, expected in zip(readers, (True, False, True), (True, False, False), strict=True):
        reader.open(MANIFEST)
        promise = reader.acquire(keys, 30.0, 0.0, ()).result(WAIT_S)
        assert len(promise.objects) == len(keys)
        wait_until(lambda: held(node_process) == (1, 0), WAIT_S)
        reader.release(promise, cold=consumes)
        wait_until(lambda: held(node_process) == (0, 0), WAIT_S)
        assert cold(node_process, keys) == [expected] * len(keys)
    for reader in readers:
        reader.close()


def test_a_second_writer_learns_that_it_exists(control) -> None:
    control.open(MANIFEST)
    stored(control, 2)
    again = control.reserve(asks(2), 30.0).result(WAIT_S)
    assert [isinstance(one, NotGranted) and one.stored for one in again] == [True, True]


def test_an_abort_gives_back_what_was_granted(control, node_process) -> None:
    control.open(MANIFEST)
    grants = control.reserve(asks(3), 30.0).result(WAIT_S)
    wait_until(lambda: held(node_process) == (0, 2), WAIT_S)
    control.abort([grant for grant in grants if isinstance(grant, Grant)], quiet=True)
    wait_until(lambda: held(node_process) == (0, 0), WAIT_S)


def test_an_abandoned_acquire_leaves_no_lease(control, node_process) -> None:
    control.open(MANIFEST)
    keys = stored(control, 4)
    answered = control.acquire(keys, 30.0, 0.0, ())
    answered.result(WAIT_S)
    wait_until(lambda: held(node_process) == (1, 0), WAIT_S)
    control.abandon(answered)
    under_way = control.acquire([*keys, Key(b"x" * 32)], 30.0, 20.0, ())  # waits for what never comes
    control.abandon(under_way)
    wait_until(lambda: held(node_process) == (0, 0), WAIT_S)


def test_a_hand_off_waits_for_the_commit(control) -> None:
    control.open(MANIFEST)
    grants = control.reserve(asks(5), 30.0).result(WAIT_S)
    waiting = control.acquire([ask.key for ask in asks(5)], 30.0, 20.0, ("00" * 8, "not an id"))
    assert not waiting.done()
    control.commit([(grant, bytes(8)) for grant in grants if isinstance(grant, Grant)])
    promise = waiting.result(WAIT_S)
    assert len(promise.objects) == 2
    control.release(promise)


def test_slow_work_is_done_elsewhere(control) -> None:
    assert control.call(lambda: 6 * 7).result(WAIT_S) == 42


def test_nobody_there_is_an_answer() -> None:
    control = Background(ClientConfig(node="127.0.0.1:9", request_timeout_s=0.5))
    control.open(MANIFEST)
    keys = [ask.key for ask in asks(6)]
    assert control.lookup(keys).result(WAIT_S).reason is MissReason.INDEX_DOWN
    promise = control.acquire(keys, 30.0, 0.0, ()).result(WAIT_S)
    assert promise.objects == () and promise.reason in {MissReason.NODE_DOWN, MissReason.BREAKER_OPEN}
    answers = control.reserve(asks(6), 30.0).result(WAIT_S)
    assert not any(isinstance(answer, Grant) for answer in answers)
    control.close()
    control.close()


def test_what_is_given_back_is_not_renewed(monkeypatch) -> None:
    """Mutant: the promise goes on naming it, and its node, which knows the lease no more, ends all of it with 0."""
    control = Background(ClientConfig(node="127.0.0.1:9", request_timeout_s=0.5))
    control.open(MANIFEST)
    keys = [ask.key for ask in asks(7)]
    generation = Generation(bytes(8))
    answers: list[Resident | OnDisk] = [Resident(generation, (), 64, bytes(8)), OnDisk(generation, 64, 1.5)]
    copies = tuple(
        Copy(key, Node(number).address, LeaseId(bytes([number])), answer)
        for number, (key, answer) in enumerate(zip(keys, answers, strict=True), 1)
    )
    seen = []

    async def acquire(*_, **__):
        return Promise(MANIFEST.namespace, copies, 0.0, None)

    async def release(promise, given_back=(), *, cold=False):
        seen.append(("release", tuple(given_back)))

    async def renew(promise, _):
        seen.append(("renew", tuple(copy.key for copy in promise.copies)))
        return 30.0

    for method in (acquire, release, renew):
        monkeypatch.setattr(control._client, method.__name__, method)
    promise = control.acquire(keys, 30.0, 0.0, ()).result(WAIT_S)
    assert [(one.tier, one.eta_s) for one in promise.objects] == [(Tier.DRAM, 0.0), (Tier.NVME, 1.5)]
    promise = control.shorten(promise, [keys[0]])
    assert [one.key for one in promise.objects] == [keys[1]]
    control.renew(promise, 30.0).result(WAIT_S)
    control.release(promise)
    wait_until(lambda: len(seen) == 3, WAIT_S)
    assert seen == [("release", (keys[0],)), ("renew", (keys[1],)), ("release", ())]
    control.close()


# --- with vLLM's scheduler ----------------------------------------------------------------------------


def test_one_engine_saves_and_another_loads(node_process) -> None:
    pages = Node()
    prefill = Engine(pages, control=connect(node_process))
    first = generate(prefill, "a")
    wait_until(lambda: prefill.half.shared.stats.committed_objects == 4, WAIT_S)
    prefill.connector.shutdown()
    decode = Engine(pages, control=connect(node_process))
    assert generate(decode, "b", params=prefill.params["a"]) == first
    assert decode.half.shared.stats.pulled_tokens == STORED
    assert generate(decode, "c", prompt(2, CHUNK)) is not None
    wait_until(lambda: node_process.stats()["store"]["totals"]["hit_tokens"] == STORED, WAIT_S)
    decode.connector.shutdown()
    for engine in (prefill, decode):
        engine.assert_nothing_left()
    wait_until(lambda: held(node_process) == (0, 0), WAIT_S)


def test_a_node_that_dies_and_returns_costs_hits_only(tmp_path) -> None:
    """kill -9 between two requests: the engine goes on, and uses the node again when it is back."""
    pages = Node()
    with running_node(tmp_path) as node:
        engine = Engine(pages, control=connect(node), prefix_caching=False, lookup_timeout_s=0.3)
        first = generate(engine, "a")
        assert engine.half.shared.stats.committed_objects == 4
        node.kill()
        assert generate(engine, "b") == first
        assert engine.half.shared.stats.pulled_tokens == 0
        with Process(node_command(control_listen=node.control), tmp_path / "again.log") as again:
            again.wait_for_output("kvstore is ready")
            engine.half.shared.known.clear()

            def committed_again() -> bool:
                generate(engine, f"c{len(engine.tokens)}")
                return engine.half.shared.stats.committed_objects >= 8

            wait_until(committed_again, WAIT_S)
            assert generate(engine, "d") == first
            assert engine.half.shared.stats.pulled_tokens >= STORED
            engine.connector.shutdown()
        engine.assert_nothing_left()
