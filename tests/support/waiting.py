"""Waiting for something that must become true: poll with a deadline, never sleep and hope."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.01


def wait_until(condition: Callable[[], T], deadline_s: float = 10.0, what: str = "") -> T:
    """The first true answer of `condition`; AssertionError when none came within `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what or condition}"
        time.sleep(POLL_S)
    return answer


async def wait_until_async(condition: Callable[[], T], deadline_s: float = 10.0, what: str = "") -> T:
    """As `wait_until`, while the loop goes on."""
    end = time.monotonic() + deadline_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what or condition}"
        await asyncio.sleep(POLL_S)
    return answer
