"""What Mooncake is told through the environment, and which RDMA devices are taken."""

import os
from pathlib import Path

import pytest

from kvstore.core import TransferFailed
from kvstore.transfer.environment import (
    PORT_FIRST,
    PORT_LAST,
    PORTS_PER_BOOT,
    check_devices,
    port_window,
    prepare_environment,
    wait_s,
)


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A process environment of our own, empty."""
    ours: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", ours)
    return ours


def test_tcp_is_tcp_even_where_there_is_rdma(environ: dict[str, str]) -> None:
    environ["MC_FORCE_HCA"] = "1"
    prepare_environment("tcp", 3)
    assert environ["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_HCA" not in environ


def test_rdma_is_rdma_or_nothing(environ: dict[str, str]) -> None:
    environ["MC_FORCE_TCP"] = "1"
    prepare_environment("rdma", 3)
    assert environ["MC_FORCE_HCA"] == "1"
    assert "MC_FORCE_TCP" not in environ


def test_writes_are_acknowledged_whatever_the_operator_has_set(environ: dict[str, str]) -> None:
    environ["MC_TCP_PROTO"] = "1"
    prepare_environment("tcp", 3)
    assert "MC_TCP_PROTO" not in environ


def test_the_progress_timeout_is_whole_seconds_and_at_least_one(environ: dict[str, str]) -> None:
    for asked_s, told in ((0.2, "1"), (3.4, "3"), (10, "10")):
        prepare_environment("tcp", asked_s)
        assert environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == told


def test_an_operators_ports_and_log_level_are_kept(environ: dict[str, str]) -> None:
    environ.update({"MC_MIN_PRC_PORT": "20000", "MC_LOG_LEVEL": "INFO"})
    prepare_environment("tcp", 3)
    assert "MC_MIN_RPC_PORT" not in environ
    assert environ["MC_LOG_LEVEL"] == "INFO"


def test_boots_in_a_row_use_other_ports() -> None:
    """Within half a minute no window comes twice, and all lie in Mooncake's own range."""
    windows = [port_window(1_800_000_000.9 + second) for second in range(30)]
    assert len(set(windows)) == 30
    firsts = [PORT_FIRST + window * PORTS_PER_BOOT for window in windows]
    assert min(firsts) >= PORT_FIRST
    assert max(firsts) + PORTS_PER_BOOT - 1 <= PORT_LAST


@pytest.mark.parametrize("took_s", [0.0, 0.3, 0.9, 2.0])
@pytest.mark.parametrize("began_s", [0.0, 0.25, 0.5, 0.999])
def test_a_boot_within_the_second_of_the_one_before_uses_other_ports(began_s: float, took_s: float) -> None:
    """The one before took its ports at any time up to when this one began. Mutant: it does not wait."""
    began_s += 1_800_000_000
    for before_s in (0.0, began_s % 1):
        now_s = began_s + took_s
        taken_s = now_s + wait_s(now_s, began_s)
        assert taken_s - now_s <= 1
        assert port_window(taken_s) != port_window(1_800_000_000 + before_s)
    assert wait_s(began_s - 60, began_s) == 0, "a clock that is set back stops nobody"


def devices(folder: Path, **states: str) -> Path:
    """A folder as the kernel lists devices, with a state per device."""
    for name, state in states.items():
        port = folder / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    return folder


def test_active_devices_are_taken(tmp_path: Path) -> None:
    there = devices(tmp_path, mlx5_0="4: ACTIVE\n", mlx5_1="4: ACTIVE\n", mlx5_2="1: DOWN\n")
    check_devices("mlx5_0, mlx5_1", there)
    check_devices("", there)


@pytest.mark.parametrize("wanted", ["mlx5_2", "mlx5_9", "mlx5_0,mlx5_2"])
def test_a_device_that_is_down_or_absent_is_refused_with_those_that_would_do(
    tmp_path: Path, wanted: str
) -> None:
    there = devices(tmp_path, mlx5_0="4: ACTIVE\n", mlx5_2="1: DOWN\n")
    with pytest.raises(TransferFailed, match="active devices: mlx5_0"):
        check_devices(wanted, there)


def test_no_active_device_at_all_is_refused(tmp_path: Path) -> None:
    for there in (tmp_path / "absent", devices(tmp_path, mlx5_2="1: DOWN\n")):
        with pytest.raises(TransferFailed):
            check_devices("", there)
