"""A bounded pool of threads for one device, in lanes.

A thread takes work from the first lane that has some and may run more; so reads go before writes, and a lane
that may use all threads but one can never keep a read waiting for a thread. The threads are daemons: one that
hangs in a dead device is lost, but does not keep the process from ending.

`oldest_s` is what a breaker looks at: a call that hangs cannot be cancelled, only noticed.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Work:
    """A call that waits for a thread, or runs in one."""

    __slots__ = ("call", "fail", "started_s")

    def __init__(self, call: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        self.call = call
        self.fail = fail
        self.started_s = 0.0


class Lane(Executor):
    """A queue of a pool; an executor, so that asyncio and aiofiles can use it."""

    def __init__(self, pool: "IoPool", running_max: int) -> None:
        self.waiting: deque[_Work] = deque()
        self.running = 0
        self.running_max = running_max
        self._pool = pool

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs a call when a thread is free for this lane."""
        future: Future[T] = Future()
        bound = partial(call, *args, **kwargs)
        self._pool.enter(self, _Work(partial(_run, future, bound), partial(_fail, future)))
        return future


class IoPool:
    """Threads for one device. `lanes` says how many of them each lane may use, the most urgent first."""

    def __init__(self, name: str, threads: int, lanes: Sequence[int], clock: Callable[[], float]) -> None:
        self.lanes = tuple(Lane(self, max(1, running_max)) for running_max in lanes)
        self._clock = clock
        self._changed = threading.Condition()
        self._running: dict[_Work, Lane] = {}
        self._closed = False
        for number in range(threads):
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True).start()

    def enter(self, lane: Lane, work: _Work) -> None:
        """Work of a lane waits for a thread from now on."""
        with self._changed:
            assert not self._closed, "the pool was closed"
            lane.waiting.append(work)
            self._changed.notify()

    def oldest_s(self) -> float:
        """For how long the call that has run longest is running; 0 when none is."""
        with self._changed:
            started_s = min((work.started_s for work in self._running), default=None)
        return 0.0 if started_s is None else self._clock() - started_s

    def fail_waiting(self, error: Exception) -> None:
        """What waits for a thread fails with this error instead."""
        with self._changed:
            waiting = [work for lane in self.lanes for work in lane.waiting]
            for lane in self.lanes:
                lane.waiting.clear()
        for work in waiting:
            work.fail(error)

    def close(self) -> None:
        """Threads end when they have done what waits. Nobody waits for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while (taken := self._take()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            taken.call()
            with self._changed:
                self._running.pop(taken).running -= 1
                self._changed.notify()  # a lane that was at its bound may go on

    def _take(self) -> _Work | None:
        for lane in self.lanes:
            if lane.waiting and lane.running < lane.running_max:
                work = lane.waiting.popleft()
                work.started_s = self._clock()
                lane.running += 1
                self._running[work] = lane
                return work
        return None


def _run(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is the future's, as in every executor
        future.set_exception(error)
    else:
        future.set_result(result)


def _fail(future: Future[T], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
