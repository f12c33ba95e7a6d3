"""Python's cyclic garbage collector, kept from stopping the control loop.

A full collection looks at every container there is. With 100,000 objects in the store that is hundreds of
milliseconds, in which no request is answered. What it could find is next to nothing: what the store holds has no
cycles and goes by reference counts, and what requests leave behind is young, so the collections of young generations
find it.

Python collects when so many more containers were made than freed. A store that is full frees one for each that it
makes: then nothing seems to happen, for minutes, and the young generation grows to hundreds of thousands, for
one collection of a tenth of a second. So young ones are collected by the clock.
"""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

YOUNG_S = 0.01  # from one collection to the next: at full speed half a millisecond each
MIDDLE_ROUNDS = 1_000  # of the young, until survivors are looked at once more: connections live for seconds
MIDDLE_CONTAINERS = 3_000  # when there are more before that, objects are being stored: they are left alone


async def collect_the_young() -> None:
    """Until cancelled only young containers are looked at; what is there already is left alone for good."""
    gc.collect()
    gc.freeze()
    with without_collections():
        for rounds in count(1):
            await asyncio.sleep(YOUNG_S)
            gc.collect(0)
            if rounds % MIDDLE_ROUNDS == 0:
                await asyncio.sleep(0)
                gc.collect(1)
            elif len(gc.get_objects(generation=1)) > MIDDLE_CONTAINERS:
                gc.freeze()


@contextmanager
def without_collections() -> Iterator[None]:
    """No collection happens by itself: for a start, which only makes things that stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
