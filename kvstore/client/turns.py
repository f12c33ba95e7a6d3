"""Work that the caller's thread and a helper do by turns."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

R = TypeVar("R")


def by_turns(work: Callable[[int], R], count: int, helper: Executor) -> Generator[tuple[int, R], None, None]:
    """Gives (number, work(number)) for 0 to `count` - 1 in order, each as soon as it is there.

    Numbers are begun in order, by whoever is free; a helper that is busy elsewhere is not waited for. When the
    caller goes early nothing is begun any more, and what is under way has ended.
    """
    left = deque(range(count))
    results: list[Future[R]] = [Future() for _ in left]

    def do_next() -> bool:
        try:
            number = left.popleft()
        except IndexError:
            return False
        try:
            results[number].set_result(work(number))
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            results[number].set_exception(error)
        return True

    def do_all() -> None:
        while do_next():
            pass

    helping = helper.submit(do_all) if count > 1 else None
    try:
        for number, result in enumerate(results):
            while not result.done() and do_next():
                pass
            yield number, result.result()
    finally:
        left.clear()
        if helping is not None and not helping.cancel():
            wait([helping])
