"""Work that can be done in slices, so that a long batch does not keep everybody else waiting."""

from collections.abc import Generator
from typing import TypeVar, cast

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Stops after each slice; its value is the result. One that is closed has done what it had done."""


def in_one_go(steps: Steps[T]) -> T:
    """The result, with no stop."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return cast("T", ended.value)
