"""What tests of many rooms share. The only place in tests/ that may sleep."""

from tests.support.processes import Process, free_port, wait_until_stopped
from tests.support.redis import RedisServer
from tests.support.waiting import wait_until, wait_until_async

__all__ = ["Process", "RedisServer", "free_port", "wait_until", "wait_until_async", "wait_until_stopped"]
