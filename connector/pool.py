"""A few threads for the worker half's transfers: loads before saves, and always a thread left for loads."""

import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class Pool:
    """Runs work in daemon threads: a call that hangs inside a library must not hold up the engine's end.

    Work must not raise. At most all threads but one run saves at a time.

    Args:
        threads: at least two.
        name: prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        assert threads >= 2, "one thread could not keep loads going while a save runs"
        self._changed = threading.Condition()
        self._loads: deque[Work] = deque()
        self._saves: deque[Work] = deque()
        self._saving = 0
        self._saving_max = threads - 1
        self._closed = False
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def load(self, work: Work) -> None:
        """Runs this before any save that has not begun."""
        self._enqueue(self._loads, work)

    def save(self, work: Work) -> None:
        """Runs this when no load waits."""
        self._enqueue(self._saves, work)

    def close(self) -> None:
        """Begins nothing any more; waits for nothing."""
        with self._changed:
            self._closed = True
            self._loads.clear()
            self._saves.clear()
            self._changed.notify_all()

    def _enqueue(self, queue: deque[Work], work: Work) -> None:
        with self._changed:
            if not self._closed:
                queue.append(work)
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_begin())
                if self._closed:
                    return
                saving = not self._loads
                work = (self._saves if saving else self._loads).popleft()
                self._saving += saving
            try:
                work()
            finally:
                with self._changed:
                    self._saving -= saving
                    self._changed.notify_all()

    def _may_begin(self) -> bool:
        return bool(self._loads) or (bool(self._saves) and self._saving < self._saving_max)
