"""Where a node offers its arena to clients on its host, and what happens where it cannot."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core import BadConfiguration
from kvstore.node import load_config, sharing
from kvstore.node.sections import TransferSection
from kvstore.tiers import Arena
from kvstore.wire import BootId

BOOT = BootId(b"bootboot")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(1 << 20, lock=False)
    yield made
    made.close()


def test_the_socket_is_named_after_the_boot(arena: Arena, tmp_path: Path) -> None:
    shared = sharing.share_arena(TransferSection(shm_dir=str(tmp_path / "run")), arena, BOOT, b"")
    assert shared is not None
    assert shared.path == tmp_path / "run" / f"{BOOT.hex()}.sock"
    shared.close()
    assert not arena.warnings


def test_a_directory_of_the_operators_that_cannot_be_used_ends_the_start(
    arena: Arena, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfiguration, match="file/run"):
        sharing.share_arena(TransferSection(shm_dir=str(tmp_path / "file" / "run")), arena, BOOT, b"")


def test_a_default_directory_that_cannot_be_used_is_a_warning(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sharing, "default_folder", lambda: tmp_path / "file" / "run")
    assert sharing.share_arena(TransferSection(), arena, BOOT, b"") is None
    assert ["shared memory" in warning for warning in arena.warnings] == [True]


def test_nothing_is_shared_that_should_not_be(arena: Arena) -> None:
    assert sharing.share_arena(TransferSection(shm=False), arena, BOOT, b"") is None


def test_the_default_is_a_directory_that_this_user_can_have(tmp_path: Path) -> None:
    assert sharing.default_folder(tmp_path) == tmp_path / "kvstore"
    assert sharing.default_folder(tmp_path / "absent").name.startswith("kvstore-")


@pytest.mark.parametrize("value", ["root", "-1", "1000;1001", "1000,"])
def test_users_are_named_by_their_ids(value: str) -> None:
    with pytest.raises(BadConfiguration, match=r"transfer\.shm_uids must be user ids"):
        load_config({"transfer.shm_uids": value}, {})
    assert load_config({"transfer.shm_uids": "1000, 1001"}, {}).config.transfer.shm_uids == "1000, 1001"
