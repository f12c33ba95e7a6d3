"""Engines that were asked a moment ago, and still keep a core each busy.

A vLLM process that reads messages from others (a worker, an engine core) goes on looking for the next one for a
second after the last, without sleeping. Where engines take turns, each would be measured beside the one before it.
"""

import time

SPIN_S = 1.0  # `busy_loop_s` of vLLM's SpinCondition


def let_them_sleep() -> None:
    """Waits until nobody spins any more."""
    time.sleep(1.2 * SPIN_S)
