"""Every policy keeps the contract."""

from kvstore.policy import Lru, PrefixLru
from tests.contracts.policy import policy_machine

TestLru = policy_machine(Lru)
TestPrefixLru = policy_machine(PrefixLru)
