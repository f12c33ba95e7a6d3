"""Eviction: pure; state in, plan out; the plain twin beside the clever one."""

from kvstore.policy.base import Plan, Policy

__all__ = ["Plan", "Policy"]
