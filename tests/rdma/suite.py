"""What holds over TCP holds over RDMA: the contract of transfers, a node, late bytes, no silent change.

Runs in the machine of `make test-rdma` only.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.client import Grant
from kvstore.core import Key, TransferFailed
from kvstore.transfer import RDMA_PACKET_BYTES_MAX, MooncakeTransfer, Piece, Status
from tests.contracts.transfer import SIZE, Rig, TransferSuite
from tests.contracts.transfer_memory import Memory
from tests.faults.support import ArenaWindow, Engine, chain, extents_of, payload, shape
from tests.rdma.wire import HERE, THERE, blackhole, heal, packets
from tests.support import wait_until
from tests.support.node import RunningNode, node_command, running_node
from tests.transfer.mooncake_rig import MooncakeRig

OBJECT_BYTES, PAGE_BYTES, OBJECTS = 2 << 20, 1 << 20, 6
MANIFEST = shape(OBJECT_BYTES)
GIVES_UP_S = 1.0
HOLD_S = 60.0
BACK_S = 60.0


class RdmaRig(MooncakeRig):
    """The peer's processor takes no part in a transfer: what stops one is the network."""

    def stop(self) -> None:
        blackhole()

    def resume(self) -> None:
        heal()

    def kill(self) -> None:
        super().kill()
        heal()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = RdmaRig(tmp_path_factory.mktemp("rig"), HERE, THERE)
    yield rig
    rig.close()


@pytest.fixture
def fragile_rig(tmp_path: Path) -> Iterator[Rig]:
    rig = RdmaRig(tmp_path, HERE, THERE)
    yield rig
    rig.close()


@pytest.fixture(autouse=True)
def whole_cable() -> Iterator[None]:
    yield
    heal()


class TestRdma(TransferSuite):
    def test_unregistering_stops_late_bytes(self, rig: Rig) -> None:
        """As over TCP, but that Mooncake needs a while afterwards to connect to this peer again."""
        memory = Memory(SIZE)
        rig.transfer.register(memory.address, SIZE)
        assert rig.read(Piece(memory.address, rig.remote_address, 4096)) is Status.DONE
        rig.stop()
        handle = rig.transfer.submit_read(rig.segment, [Piece(memory.address, rig.remote_address, SIZE)])
        assert rig.transfer.poll(handle) is Status.PENDING
        rig.transfer.unregister(memory.address)
        memory.fill(5)
        rig.resume()
        assert rig.end(handle) is Status.FAILED
        assert memory.is_all(5)


# --- a node -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(
        tmp_path_factory.mktemp("node"),
        dram_size_bytes="160MiB",
        transfer_hold_s=HOLD_S,
        transfer_host=THERE.host,
        transfer_protocol=THERE.protocol,
        transfer_devices=THERE.devices,
    ) as running:
        yield running


@pytest.fixture
def engine(node: RunningNode) -> Iterator[Engine]:
    transfer = HERE.open()
    with Engine(node.control, MANIFEST, timeout_s=20.0, request_timeout_s=5.0, transfer=transfer) as engine:
        yield engine
    transfer.close()


def bad_copies(node: RunningNode) -> int:
    return int(node.stats()["store"]["totals"]["bad_copies"])


def test_a_push_and_a_pull_through_a_node_go_over_rdma(node: RunningNode, engine: Engine) -> None:
    keys = chain(MANIFEST.namespace, OBJECTS, 1)
    before = packets()
    assert engine.put(keys) == keys
    pushed = packets() - before
    assert engine.get(keys) == OBJECTS
    pulled = packets() - before - pushed
    print(f"\n{OBJECTS} objects of {OBJECT_BYTES >> 20} MiB: {pushed} packets pushed, {pulled} pulled")
    assert min(pushed, pulled) >= OBJECTS * OBJECT_BYTES // RDMA_PACKET_BYTES_MAX
    assert bad_copies(node) == 0


def test_late_bytes_after_a_blackhole_land_in_held_pages(node: RunningNode, engine: Engine) -> None:
    """Time is up in the middle of a push, the cable is whole again, and what Mooncake still had to send arrives."""
    kept = chain(MANIFEST.namespace, OBJECTS, 2)
    assert engine.put(kept) == kept
    grants = [grant for grant in engine.reserve(chain(MANIFEST.namespace, OBJECTS, 3)) if grant.granted]
    address = grants[0].address
    assert len(grants) == OBJECTS and address is not None
    results = engine.push(
        address, grants, timeout_s=GIVES_UP_S, before=lambda number: blackhole() if number == 2 else None
    )
    lost = [
        grant for grant, result in zip(grants, results, strict=True) if not result.ok and not result.quiet
    ]
    assert lost, "nothing was under way when the cable was cut"
    with ArenaWindow(node, PAGE_BYTES) as arena:
        before = [arena.read(placed(grant), OBJECT_BYTES) for grant in lost]
        engine.abort(grants, results)
        heal()
        new = chain(MANIFEST.namespace, OBJECTS, 4)
        wait_until(lambda: len(engine.put(new)) == OBJECTS, BACK_S, "objects are stored again")
        wait_until(lambda: engine.staging.stats().retired_bytes == 0, BACK_S, "all transfers have ended")
        landed = [
            arena.read(placed(grant), OBJECT_BYTES) == payload(grant.item.key, OBJECT_BYTES) != old
            for grant, old in zip(lost, before, strict=True)
        ]
    print(f"\n{len(lost)} of {OBJECTS} objects were given up, {sum(landed)} of them landed whole after that")
    assert any(landed), "no byte came late"
    assert engine.get([*kept]) == engine.get([*new]) == OBJECTS
    assert bad_copies(node) == 0
    assert not visible(engine, [grant.item.key for grant in lost])


def placed(grant: Grant):
    assert grant.granted is not None
    return extents_of(grant.granted.extents)


def visible(engine: Engine, keys: list[Key]) -> int:
    promise = engine.acquire(keys)
    engine.release(promise)
    return len(promise)


# --- no silent change ---------------------------------------------------------------------------------


def test_a_node_with_a_wrong_device_does_not_start() -> None:
    command = node_command(
        transfer_protocol="rdma", transfer_devices="no_such_device", transfer_host=THERE.host
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "no_such_device is not there" in done.stderr and "rxe0, rxe1" in done.stderr


def test_a_client_with_a_wrong_device_does_not_start() -> None:
    with pytest.raises(TransferFailed, match="no_such_device is not there"):
        MooncakeTransfer(HERE.host, "rdma", "no_such_device")


@pytest.mark.parametrize(
    ("flags", "state", "says"),
    [
        (["--transfer-protocol", "tcp"], "ok", "by tcp"),
        (["--transfer-protocol", "rdma", "--transfer-devices", "rxe0"], "ok", "by rdma"),
        (["--transfer-protocol", "rdma"], "ok", "by rdma"),
        (["--transfer-protocol", "rdma", "--transfer-devices", "rxe7"], "fail", "rxe7 is not there"),
    ],
)
def test_check_shows_which_transport_really_moved_bytes(flags, state, says, capsys) -> None:
    """With adapters in sight: tcp stays tcp, rdma is rdma, by the adapters' counters."""
    before = packets()
    main(["check", "--json", "--dram-size-bytes", "64MiB", "--transfer-host", HERE.host, *flags])
    moved = packets() - before
    (finding,) = [
        each for each in json.loads(capsys.readouterr().out)["findings"] if "mooncake," in each["subject"]
    ]
    with capsys.disabled():
        print(f"\n{finding['state']}: {finding['subject']}: {finding['text']}")
    assert finding["state"] == state and says in finding["text"]
    assert (moved > 1_000) == (says == "by rdma")
