"""Eviction: pure; state in, plan out; the plain twin beside the clever one."""

from kvstore.policy.base import Plan, Policy
from kvstore.policy.lru import Lru
from kvstore.policy.prefix import PrefixLru

__all__ = ["Lru", "Plan", "Policy", "PrefixLru"]
