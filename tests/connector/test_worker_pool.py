"""Loads before saves, and always a thread for loads."""

import threading
from functools import partial

from connector.pool import Pool
from tests.support import wait_until


def occupy(event: threading.Event, go: threading.Event) -> None:
    event.set()
    go.wait(10)


def test_loads_are_begun_before_saves_that_wait() -> None:
    order: list[str] = []
    pool, go, started = Pool(2, "test"), threading.Event(), [threading.Event(), threading.Event()]
    for event in started:
        pool.load(partial(occupy, event, go))
    assert all(event.wait(10) for event in started)
    for _ in range(3):
        pool.save(partial(order.append, "save"))
    for _ in range(3):
        pool.load(partial(order.append, "load"))
    go.set()
    wait_until(lambda: len(order) == 6)
    pool.close()
    assert order[:2] == ["load", "load"]
    assert order.index("save") >= 2


def test_saves_never_take_the_last_thread() -> None:
    pool, go, running = Pool(3, "test"), threading.Event(), [threading.Event() for _ in range(5)]
    for event in running:
        pool.save(partial(occupy, event, go))
    wait_until(lambda: sum(event.is_set() for event in running) == 2)
    loaded = threading.Event()
    pool.load(loaded.set)
    assert loaded.wait(10), "a load waited for saves"
    assert sum(event.is_set() for event in running) == 2
    go.set()
    wait_until(lambda: all(event.is_set() for event in running))
    pool.close()


def test_nothing_is_begun_after_close() -> None:
    pool, done = Pool(2, "closing"), threading.Event()
    pool.close()
    pool.load(done.set)
    pool.save(done.set)
    wait_until(lambda: not any(thread.name.startswith("closing-") for thread in threading.enumerate()))
    assert not done.is_set()
