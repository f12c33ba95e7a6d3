"""Work by turns.

Mutants that must fail here: results in the order of their ends; a helper that is waited for although it never began;
a caller that goes while the helper still works; an error that is lost.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.client.turns import by_turns

SOON_S = 30.0
MANY = 10_000


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_two_threads_work_at_a_time_and_results_come_in_order(helper: ThreadPoolExecutor) -> None:
    both = threading.Barrier(2)

    def work(number: int) -> tuple[int, str]:
        both.wait(SOON_S)  # nobody gets on alone
        return 10 * number, threading.current_thread().name

    got = list(by_turns(work, 6, helper))
    assert [(number, result[0]) for number, result in got] == [(n, 10 * n) for n in range(6)]
    assert len({result[1] for _, result in got}) == 2


def test_a_helper_that_is_busy_elsewhere_is_not_waited_for(helper: ThreadPoolExecutor) -> None:
    free = threading.Event()
    helper.submit(free.wait, SOON_S)
    assert list(by_turns(lambda number: -number, 3, helper)) == [(0, 0), (1, -1), (2, -2)]
    assert not free.is_set()
    free.set()


def test_one_piece_of_work_and_none_need_no_helper(helper: ThreadPoolExecutor) -> None:
    helper.shutdown()
    assert list(by_turns(lambda number: number, 1, helper)) == [(0, 0)]
    assert list(by_turns(lambda number: number, 0, helper)) == []


def test_when_the_caller_goes_nothing_begins_and_nothing_is_under_way(helper: ThreadPoolExecutor) -> None:
    """The helper works on the second when the caller goes; then, with leave for more, it takes no other."""
    free, leave, ended = threading.Event(), threading.Semaphore(0), list[int]()
    helper.submit(free.wait, SOON_S)

    def work(number: int) -> int:
        assert number == 0 or leave.acquire(timeout=SOON_S)
        ended.append(number)
        return number

    going = by_turns(work, MANY, helper)
    assert next(going) == (0, 0)
    free.set()
    goes = threading.Thread(target=going.close)
    goes.start()
    while goes.is_alive():
        leave.release()
        goes.join(0.01)
    count = len(ended)
    assert count < MANY
    assert helper.submit(lambda: len(ended)).result(SOON_S) == count


def test_an_error_is_raised_where_its_result_would_be(helper: ThreadPoolExecutor) -> None:
    def work(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    going = by_turns(work, 4, helper)
    assert [next(going), next(going)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="two"):
        next(going)
