"""Mooncake over loopback TCP, against a peer in a process of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core import TransferFailed
from kvstore.transfer import MooncakeTransfer
from tests.contracts.transfer import Rig, TransferSuite
from tests.transfer.mooncake_rig import MooncakeRig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = MooncakeRig(tmp_path_factory.mktemp("rig"))
    yield rig
    rig.close()


@pytest.fixture
def fragile_rig(tmp_path: Path) -> Iterator[Rig]:
    rig = MooncakeRig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.process
class TestMooncake(TransferSuite):
    pass


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferFailed, match=r"pip.*libibverbs1"):
        MooncakeTransfer("127.0.0.1")


def test_only_known_protocols_are_taken() -> None:
    with pytest.raises(TransferFailed, match="tcp or rdma"):
        MooncakeTransfer("127.0.0.1", protocol="quic")


def test_a_device_that_is_not_there_is_an_error_not_tcp() -> None:
    with pytest.raises(TransferFailed, match="no_such_device"):
        MooncakeTransfer("127.0.0.1", protocol="rdma", devices="no_such_device")
