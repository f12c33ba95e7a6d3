"""Python's cyclic garbage collector, kept from stopping the control loop.

A full collection looks at every container there is. With 100,000 objects in the store that is hundreds of
milliseconds, in which no request is answered, and it would come every few thousand reservations. What it could
find is next to nothing: what the store holds has no cycles and goes by reference counts, and what requests
leave behind is young, so the collections of young generations find it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_ALLOCATIONS = 5_000  # more containers than freed ones, between two collections of the youngest
MIDDLE_EVERY = 5  # of these: 25,000 containers to look at, some milliseconds
FULL_EVERY = 1_000_000


def keep_collections_short() -> None:
    """From now on only young containers are looked at; what is there already is left alone for good."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_ALLOCATIONS, MIDDLE_EVERY, FULL_EVERY)


@contextmanager
def without_collections() -> Iterator[None]:
    """For a start, which only makes things that stay: collections would look at all of them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
