"""Every policy keeps the contract."""

import pytest

from kvstore.policy import Lru, PrefixLru
from tests.contracts.policy import machine_of, walk

LruMachine = machine_of(Lru)
PrefixLruMachine = machine_of(PrefixLru)
TestLru = LruMachine.TestCase
TestPrefixLru = PrefixLruMachine.TestCase


@pytest.mark.parametrize("seed", range(60))
def test_a_long_walk(seed: int) -> None:
    walk(PrefixLruMachine, seed)
