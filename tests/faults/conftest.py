"""Rounds: a few in CI, many by `make soak`."""

import os
from collections.abc import Callable

import pytest

SOAK = os.environ.get("SOAK") == "1"
SOAK_TIMEOUT_S = 3_600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SOAK:
        for item in items:
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))


@pytest.fixture
def rounds() -> Callable[[int, int], int]:
    """`rounds(few, many)`: how often a fault is tried."""
    return lambda few, many: many if SOAK else few
