"""Registering staging with the driver, with a driver that only writes down what it is asked: there is no GPU here, so
that DMA is really faster or happens at all is not shown.

Mutants that must fail here: unregistered when it was refused; never unregistered, or at another address, or when the
memory is gone; CUDA asked where there is none.
"""

import ctypes
from typing import NamedTuple

import pytest
import torch

from connector.pinning import pin
from kvstore.client import Staging
from kvstore.core import limits
from kvstore.transfer import InProcessNetwork, InProcessTransfer


class Driver:
    """Stands for `torch.cuda.cudart()`."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        self.asked.append(("register", address, size_bytes))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        mapped = ctypes.c_char.from_address(address).value == b"\0"  # else this is the end of the process
        self.asked.append(("unregister", address, int(mapped)))
        return 0


class Region(NamedTuple):
    address: int
    size_bytes: int


def driven(monkeypatch: pytest.MonkeyPatch, driver: Driver, available: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)


def pinned_for_a_while() -> Region:
    """Staging that is made, pinned and given up."""
    staging = Staging(InProcessTransfer(InProcessNetwork()), limits.MIB)
    region = Region(staging.address, staging.size_bytes)
    pin(staging)
    return region


def test_staging_is_registered_whole_and_let_go_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    driven(monkeypatch, driver)
    region = pinned_for_a_while()
    assert driver.asked == [("register", *region), ("unregister", region.address, 1)]


def test_a_driver_that_refuses_is_a_line_and_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(answer=2)
    driven(monkeypatch, driver)
    region = pinned_for_a_while()
    assert driver.asked == [("register", *region)]


def test_without_cuda_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driven(monkeypatch, driver, available=False)
    pinned_for_a_while()
    assert not driver.asked
