"""A queue is a list, whatever is appended to it and taken out of it."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import Link, Queue, unlink


class Number(Link, eq=False, gc=False):
    number: int


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1))))
def test_two_queues_are_two_lists(steps: list[tuple[int, int]]) -> None:
    """A step moves a number to the end of one of two queues, or, if it is the last there already, takes it out.

    Mutants: a link that is taken out still points at its neighbours; the end does not hear that its last one went.
    """
    numbers = [Number(n) for n in range(10)]
    queues: list[Queue[Number]] = [Queue(), Queue()]
    lists: list[list[int]] = [[], []]
    for n, to in steps:
        was_last = lists[to][-1:] == [n]
        unlink(numbers[n])
        for each in lists:
            if n in each:
                each.remove(n)
        if not was_last:
            queues[to].append(numbers[n])
            lists[to].append(n)
        assert [[link.number for link in queue] for queue in queues] == lists
    assert all(
        (link.before is None) == (link.after is None) == (link.number not in lists[0] + lists[1])
        for link in numbers
    )


def test_what_left_a_queue_is_freed_without_the_collector() -> None:
    """Mutant: a link that is taken out keeps its neighbours, so that two who left keep each other."""

    class Told(Link, eq=False, gc=False):
        told: list[int]

        def __del__(self) -> None:
            self.told.append(1)

    told: list[int] = []
    queue: Queue[Told] = Queue()
    gc.disable()
    try:
        for _ in range(3):
            queue.append(Told(told))
        for link in list(queue):
            unlink(link)
        del link
        assert len(told) == 3
    finally:
        gc.enable()
