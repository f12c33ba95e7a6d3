"""Which node is asked for which keys, and in what portions. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from kvstore.core import limits

N = TypeVar("N")
A = TypeVar("A")
B = TypeVar("B")

_FRAME_ROOM_BYTES = limits.FRAME_BYTES_MAX - 64 * limits.KIB  # beside the envelope
_EXTENT_BYTES = 11  # two numbers of four bytes in an array of two
_NAMES_BYTES = 128  # key, generation, sizes, the kind's name


def of_each(values: Iterable[A], function: Callable[[A], B]) -> list[B]:
    """What `function` says of each value, asked once for neighbours that are one object.

    The 512 keys of a chain mostly lie on one node, and what is known of neighbours is one and the same object.
    """
    results: list[B] = []
    previous: object = results  # no value
    for value in values:
        if value is previous:
            results.append(results[-1])
        else:
            results.append(function(value))
            previous = value
    return results


def assign(holders: Sequence[Collection[N]], preferred: Callable[[N], bool]) -> list[N]:
    """One holder for each key of a chain, in order, up to the first key without one.

    A preferred node is used wherever it holds a key; elsewhere the holder with the longest run of keys
    from there on, so that few nodes are involved.
    """
    chosen: list[N] = []
    current: N | None = None
    previous: object = None
    for index, nodes in enumerate(holders):
        if nodes is previous:
            chosen.append(chosen[-1])
            continue
        if not nodes:
            break
        previous = nodes
        favourite = next((node for node in nodes if preferred(node)), None)
        if favourite is not None:
            chosen.append(favourite)
            current = None
            continue
        if current is None or current not in nodes:
            current = max(nodes, key=lambda node: run_length(holders, index, node))
        chosen.append(current)
    return chosen


def run_length(holders: Sequence[Collection[N]], start: int, node: N) -> int:
    """Consecutive keys from `start` on that `node` holds."""
    length = 0
    while start + length < len(holders) and node in holders[start + length]:
        length += 1
    return length


def grouped(items: Sequence[A], owners: Sequence[N]) -> dict[N, list[A]]:
    """The items that belong to each owner, in order; those without an owner, at the end, are left out."""
    groups: dict[N, list[A]] = {}
    at = 0
    for owner, neighbours in groupby(owners):
        end = at + sum(1 for _ in neighbours)
        groups.setdefault(owner, []).extend(items[at:end])
        at = end
    return groups


def batches(items: Sequence[N], item_bytes: int = 0) -> list[Sequence[N]]:
    """Portions that fit into one message each, request and reply; an item takes at most `item_bytes` of either."""
    size = max(1, min(limits.BATCH_KEYS_MAX, _FRAME_ROOM_BYTES // max(1, item_bytes)))
    return [items[start : start + size] for start in range(0, len(items), size)]


def item_bytes(num_runs: int) -> int:
    """What one key with its table takes in a frame, at most: in Commit, or in the answer to Acquire or Pages."""
    return num_runs * limits.CHECKSUM_BYTES + limits.EXTENTS_PER_OBJECT_MAX * _EXTENT_BYTES + _NAMES_BYTES
