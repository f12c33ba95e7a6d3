"""`kvstore format`: what is there is said, and asked for, before it is gone; nothing in use is touched.

Mutants that must fail here: formatting without an answer; a default answer of yes; opening without a lock; a rebuild
that formats; a file made where a device was meant.
"""

import io
import shutil
import subprocess

import pytest

from kvstore.cli import main
from kvstore.tiers import FileDevice, read_label
from tests.cli.nvme import OURS, catalog_of, filled, made

SMALL = ("--page-bytes", "4KiB")


class Terminal(io.StringIO):
    """Somebody is there."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def answer(monkeypatch):
    """Somebody at a terminal who types this."""
    return lambda text: monkeypatch.setattr("sys.stdin", Terminal(text))


@pytest.fixture
def disk(tmp_path):
    return tmp_path / "disk"


def label_of(path):
    device = FileDevice.open(str(path))
    label = read_label(device)
    device.close()
    return label


def test_a_file_is_made_and_formatted(disk, capsys) -> None:
    assert main(["format", str(disk), "--size", "64MiB", "--node-id", "n1"]) == 0
    assert disk.stat().st_size == 64 << 20
    assert disk.stat().st_blocks * 512 >= 64 << 20, "its space must be its own"
    label = label_of(disk)
    assert (label.node, label.page_bytes, label.epoch) == ("n1", 1 << 20, 0)
    assert label.created_s > 1_700_000_000
    assert label.uuid_text in capsys.readouterr().out


def test_node_and_pages_come_from_the_nodes_configuration(disk, tmp_path) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text('[node]\nid = "from-file"\n[dram]\npage_bytes = "64KiB"\nsize_bytes = "64MiB"\n')
    assert main(["format", str(disk), "--size", "8MiB", "--config", str(config)]) == 0
    assert (label_of(disk).node, label_of(disk).page_bytes) == ("from-file", 65_536)


@pytest.mark.parametrize("typed", ["\n", "y\n", "no\n", "", "YES\n"])
def test_anything_but_yes_leaves_it_as_it_is(disk, answer, capsys, typed) -> None:
    made(disk)
    before = disk.read_bytes()
    answer(typed)
    assert main(["format", str(disk), "--node-id", "other"]) == 2
    assert disk.read_bytes() == before
    said = capsys.readouterr()
    assert f"of the node '{OURS}'" in said.out and "format 1" in said.out and "destroys" in said.out
    assert said.err == f"kvstore: {disk} was left as it is\n"


def test_yes_formats_it_and_forgets_its_catalog(disk, answer) -> None:
    made(disk)
    filled(disk, 3)
    old = label_of(disk)
    assert (catalog_of(disk) / old.uuid_text).is_dir()
    answer("yes\n")
    assert main(["format", str(disk), "--node-id", "other", *SMALL]) == 0
    label = label_of(disk)
    assert (label.node, label.epoch) == ("other", 0)
    assert label.uuid != old.uuid
    assert not (catalog_of(disk) / old.uuid_text).exists()


def test_nobody_to_ask_means_no(disk, capsys, monkeypatch) -> None:
    made(disk)
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    before = disk.read_bytes()
    assert main(["format", str(disk)]) == 2
    assert disk.read_bytes() == before
    assert "add --yes" in capsys.readouterr().err
    assert main(["format", str(disk), "--yes", "--node-id", "n2", *SMALL]) == 0
    assert label_of(disk).node == "n2"


def test_what_is_in_use_is_refused_even_with_yes(disk, capsys) -> None:
    made(disk)
    node = FileDevice.open(str(disk))
    before = disk.read_bytes()
    assert main(["format", str(disk), "--yes"]) == 2
    assert main(["format", "--rebuild-catalog", str(disk)]) == 2
    node.close()
    assert disk.read_bytes() == before
    assert capsys.readouterr().err.count("is used by another process") == 2


def test_a_file_system_is_named(disk, answer, capsys) -> None:
    disk.write_bytes(bytes(16 << 20))
    mkfs = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin")
    assert mkfs, "e2fsprogs is part of Debian"
    subprocess.run([mkfs, "-q", str(disk)], check=True)
    answer("no\n")
    assert main(["format", str(disk)]) == 2
    assert "holds ext4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is blank"),
        (b"something else", "holds something that is not ours"),
        (b"KVSTORE\n", "has format 0"),
    ],
)
def test_what_is_there_is_said(disk, answer, capsys, content, says) -> None:
    disk.write_bytes(content + bytes((4 << 20) - len(content)))
    answer("no\n")
    assert main(["format", str(disk)]) == 2
    assert says in capsys.readouterr().out


MISTAKES = [
    (["/nowhere/disk"], "does not exist"),
    (["/dev/no_such_disk", "--size", "1GiB"], "not made in /dev"),
    (["{disk}", "--size", "1GiB"], "keeps its size"),
    (["{folder}", "--yes"], "neither a block device nor a file"),
    (["{disk}", "--yes", "--page-bytes", "3000"], "power of two"),
    (["{disk}", "--yes", "--page-bytes", "big"], "--page-bytes: expected a size"),
    (["{folder}/small", "--size", "64KiB"], "are too few"),
    (["--rebuild-catalog", "{disk}", "--page-bytes", "4KiB"], "leave those flags out"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_a_mistake_is_one_line_and_changes_nothing(disk, tmp_path, capsys, arguments, says) -> None:
    made(disk)
    capsys.readouterr()
    before = disk.read_bytes()
    assert main(["format", *(word.format(disk=disk, folder=tmp_path) for word in arguments)]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1
    assert disk.read_bytes() == before
    assert not (tmp_path / "small").exists()


def test_no_room_for_the_file_is_exit_code_1(disk, capsys) -> None:
    assert main(["format", str(disk), "--size", "1000TiB"]) == 1
    assert "no room" in capsys.readouterr().err
    assert not disk.exists()


def test_a_catalog_is_rebuilt_from_the_records(disk, capsys) -> None:
    made(disk)
    records = filled(disk, 5)
    shutil.rmtree(catalog_of(disk))
    assert main(["format", "--rebuild-catalog", str(disk)]) == 0
    assert "5 objects" in capsys.readouterr().out
    assert filled(disk, 0) == []
    assert main(["scrub", str(disk)]) == 0
    assert f"{len(records)} objects are sound, 0 are bad" in capsys.readouterr().out


def test_a_device_that_is_not_ours_is_not_rebuilt(disk, capsys) -> None:
    disk.write_bytes(bytes(4 << 20))
    assert main(["format", "--rebuild-catalog", str(disk)]) == 2
    assert "is blank" in capsys.readouterr().err
    assert not any(disk.read_bytes())
