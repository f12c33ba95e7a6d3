"""`kvstore check`: findings for people and for programs, and an exit code."""

import json

import pytest

from kvstore.cli import main
from tests.support import free_port


@pytest.fixture
def flags() -> list[str]:
    """A small node on ports that are free."""
    return [
        *("--dram-size-bytes", "64MiB", "--no-dram-huge-pages", "--no-dram-lock"),
        *("--control-listen", f"127.0.0.1:{free_port()}", "--admin-listen", f"127.0.0.1:{free_port()}"),
    ]


@pytest.mark.process
def test_a_machine_that_suits_passes_and_tcp_is_proved(flags, capsys) -> None:
    """Bytes are really moved: a check that believes the configuration fails here."""
    assert main(["check", "--json", *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["counts"] == {"ok": len(said["findings"]), "warn": 0, "fail": 0}
    (moved,) = [each for each in said["findings"] if each["subject"] == "mooncake, tcp"]
    assert "16 MiB went from here to here by tcp" in moved["text"]


@pytest.mark.process
def test_a_wrong_rdma_device_fails(flags, capsys) -> None:
    assert main(["check", *flags, "--transfer-protocol", "rdma", "--transfer-devices", "no_such_device"]) == 1
    said = capsys.readouterr().out
    assert "fail  mooncake, rdma: RDMA device no_such_device is not there" in said
    assert "      -> Name one of those, or use the protocol tcp." in said


def test_findings_are_lines_with_remedies_and_a_failure_is_exit_code_1(flags, capsys, tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(1 << 20))
    assert main(["check", "--no-transfer", *flags, "--nvme-path", str(disk), "--node-id", "n"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"fail  device {disk}: {disk} is blank, not a kvstore device" in lines
    assert lines[-1].endswith(" ok, 0 warn, 1 fail")
    assert any(line.startswith("      -> `kvstore format") for line in lines)


def test_a_configuration_that_cannot_work_is_exit_code_2(capsys) -> None:
    assert main(["check", "--dram-size-bytes", "huge"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
