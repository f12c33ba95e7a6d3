"""A queue from whose middle things can be taken: a doubly linked list, every step of it short.

`OrderedDict` can do the same, but now and then it is built anew: 10 ms for a hundred thousand entries, and longer
where no cache holds them, in which a node answers nobody.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar, cast

import msgspec


class Link(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What may be in one queue at a time. The collector does not look at it: what leaves a queue is in no cycle."""

    before: "Link | None" = None
    after: "Link | None" = None


L = TypeVar("L", bound=Link)


class Queue(Generic[L]):
    """Links in the order in which they were appended; one that is looked at while going through it must stay."""

    def __init__(self) -> None:
        self._end = Link()  # before the first and after the last

    def __iter__(self) -> Iterator[L]:
        link = self._end.after or self._end
        while link is not self._end:
            yield cast("L", link)
            link = link.after or self._end

    def append(self, link: L) -> None:
        """At the end. It must be in no queue."""
        end = self._end
        last = end.before or end
        link.before, link.after = last, end
        last.after = end.before = link


def unlink(link: Link) -> None:
    """Takes it out of the queue that it is in, if it is in one."""
    before, after = link.before, link.after
    if before is not None and after is not None:
        before.after, after.before = after, before
        link.before = link.after = None
