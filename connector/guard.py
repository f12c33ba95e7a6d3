"""No exception leaves a hook: the engine must not die of the store.

vLLM calls the connector from its scheduling loop, where an exception ends the engine. So every hook runs
inside `harmless`, which answers an exception with what is harmless at that place, counts it, and says each
kind once. This is the one place of the connector where everything is caught. Several such errors within a
while are a bug of ours, not an accident: the breaker opens, and from then on nothing new is begun (no
lookups, no saves), while what is under way is still brought to its end.
"""

import functools
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ParamSpec, TypeVar

from connector.compat import logger

log = logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

ERRORS_MAX = 5
WINDOW_S = 60.0


class Breaker:
    """Counts our own errors; open after `ERRORS_MAX` within `WINDOW_S`, and open it stays."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open = False
        self.errors: Counter[str] = Counter()
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=ERRORS_MAX)
        self._spent_s = 0.0
        self._inside = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside, once where such are nested. Of the engine's thread alone."""
        if self._inside:
            yield
            return
        self._inside, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            self._spent_s += time.perf_counter() - began

    def take_spent_s(self) -> float:
        """Seconds inside since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def trip(self, where: str, error: Exception) -> None:
        """One error of ours, caught in the hook `where`."""
        kind = f"{where}: {type(error).__name__}"
        self.errors[kind] += 1
        if self.errors[kind] == 1:
            frames = traceback.extract_tb(error.__traceback__)
            log.error(
                "internal error in %s: %s (%s); the engine goes on, this part of its KV is not shared",
                kind,
                error,
                f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "place unknown",
            )
            log.debug("the whole of it", exc_info=error)
        now = self._clock()
        self._recent.append(now)
        if not self.open and len(self._recent) == ERRORS_MAX and now - self._recent[0] <= WINDOW_S:
            self.open = True
            log.error(
                "%d internal errors within %.0f s: this engine does without the store until it is restarted; "
                "please report the errors above",
                ERRORS_MAX,
                WINDOW_S,
            )


def harmless(answer: Callable[[], R], *, timed: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a hook answer `answer()` instead of raising. Its object has a `breaker`.

    `timed`: it belongs to the engine's steps, which wait for it.
    """

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            breaker: Breaker = args[0].breaker  # type: ignore[attr-defined]
            try:
                with breaker.timed() if timed else nullcontext():
                    return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the reason is the subject of this file
                breaker.trip(hook.__name__, error)
                return answer()

        return guarded

    return decorate
