"""Acquire and Pages with `wait_s`: hand-off, and copies that come from NVMe, without polling.

A decode engine may ask for keys that prefill is about to commit. The request is tried again whenever the
first key that could not be promised is committed, given up or refused, until everything is promised,
somebody has given that key up, or the time is over. Keys before it stay leased meanwhile; the reply is
always made of answers that are true now.

A reader that streams asks for the pages of its keys, in order. The reply comes as soon as the first of them that is
not in DRAM yet is there, or will not be.
"""

from collections.abc import Callable
from functools import partial

import msgspec

from kvstore.core import MissReason
from kvstore.server.parking import Parking
from kvstore.store import Store
from kvstore.wire import Acquire, ClientId, Filling, Miss, OnDisk, Pages, SentAnswer

Answers = tuple[SentAnswer, ...]


def first_unpromised(answers: Answers) -> int | None:
    """Index of the first answer that is not a lease."""
    for index, answer in enumerate(answers):
        if isinstance(answer, Filling | Miss):
            return index
    return None


_MAY_COME = {
    Filling(),
    *(Miss(reason) for reason in (MissReason.NEVER_STORED, MissReason.EVICTED, MissReason.EXPIRED)),
}


def worth_waiting(answers: Answers) -> bool:
    """Whether the first unpromised key may still come: it is being written, or may be written (again)."""
    index = first_unpromised(answers)
    return index is not None and answers[index] in _MAY_COME


async def acquire_waiting(
    store: Store,
    parking: Parking,
    clock: Callable[[], float],
    client: ClientId,
    request: Acquire,
    answers: Answers,
) -> Answers:
    """The answers to `request` once there is nothing left to wait for; `answers` are the first ones.

    `Filling` becomes `Miss(pending_timeout)` when the time is over. The store is looked at before each wait, since
    a commit that came after the last look, and before the key was watched, has called nobody.
    """
    deadline = clock() + request.wait_s
    attempt = msgspec.structs.replace(request, wait_s=0.0)
    keys = request.keys
    while worth_waiting(answers) and (left_s := deadline - clock()) > 0 and not parking.closing:
        index = first_unpromised(answers) or 0
        keys, awaited = keys[index:], answers[index]
        rest = msgspec.structs.replace(attempt, keys=keys)
        answers = store.acquire(client, rest)
        if answers[0] == awaited:
            if not await parking.changed(partial(store.watch, request.namespace, keys[:1]), left_s):
                continue  # the time is over, the server stops, or the node's clock stood still
            answers = store.acquire(client, rest)
        if isinstance(answers[0], Miss):
            break  # its writer gave up, or was refused
    answers = store.acquire(client, attempt)
    return timed_out(answers) if clock() >= deadline else answers


def timed_out(answers: Answers) -> Answers:
    """The answers of a wait whose time is over: asking again at once would be no use."""
    late = Miss(MissReason.PENDING_TIMEOUT)
    return tuple(late if isinstance(answer, Filling) else answer for answer in answers)


def first_to_come(answers: Answers) -> int | None:
    """Index of the first answer that may still change, unless one before it is a miss: then nothing is waited for."""
    for index, answer in enumerate(answers):
        if isinstance(answer, OnDisk):
            return index
        if isinstance(answer, Miss):
            return None
    return None


async def pages_waiting(
    store: Store,
    parking: Parking,
    clock: Callable[[], float],
    client: ClientId,
    request: Pages,
    answers: Answers,
) -> Answers:
    """The answers to `request` once the first key that is on its way has come or failed; `answers` are the first."""
    since_s = clock()
    awaited = first_to_come(answers)
    answers = store.pages(client, request, since_s)  # what has come since then has called nobody
    while awaited is not None and first_to_come(answers) == awaited and not parking.closing:
        left_s = since_s + request.wait_s - clock()
        if left_s <= 0:
            break
        watch = partial(store.watch_leased, request.keys[awaited : awaited + 1])
        if await parking.changed(watch, left_s):
            answers = store.pages(client, request, since_s)
    return store.pages(client, request, since_s)
