"""One Acquire over several nodes, without any node: who is asked, what is kept, what is given back."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Copy, NodeAddress, NodeId, OnDisk, Resident
from kvstore.client.acquiring import Attempt
from kvstore.core import Key, MissReason, Namespace
from kvstore.wire import AcquireAnswer, BootId, Generation, LeaseId, Miss

LENGTH = 8
NAMES = "ABC"
KEYS = [Key(bytes([number]) * 32) for number in range(LENGTH)]
RESIDENT = Resident(Generation(b"g" * 8), ((0, 1),), 1, b"")
DISK = OnDisk(Generation(b"g" * 8), 1, 0.5)
ADDRESS = NodeAddress(NodeId(b"n" * 8), BootId(b"b" * 8), "host:1", {}, 0, 1)

claims = st.lists(st.lists(st.sampled_from(NAMES), unique=True), min_size=LENGTH, max_size=LENGTH)
lengths = st.integers(0, LENGTH)


class Node:
    """What a node really holds: a prefix (chunks go children first). Counts its leases."""

    def __init__(self, name: str, length: int, *, dead: bool, closed: bool) -> None:
        self.name, self.length, self.dead = name, length, dead
        self.breaker = SimpleNamespace(closed=closed)
        self.leased: set[Key] = set()
        self.asked = 0

    def acquire(self, keys: tuple[Key, ...]) -> list[AcquireAnswer]:
        answers: list[AcquireAnswer] = []
        for key in keys:
            if KEYS.index(key) >= self.length:
                return [*answers, Miss(MissReason.EVICTED)]
            self.leased.add(key)
            answers.append(RESIDENT if KEYS.index(key) % 2 else DISK)
        return answers


def run(
    nodes: dict[str, Node], claimed: list[list[str]], favourite: str, rounds: int, *, ahead: bool = False
) -> tuple[Any, Attempt]:
    """`ahead`: the favourite is asked for everything before anything is known."""
    holders: Any = [[nodes[name] for name in names] for names in claimed]
    favourites: Any = [nodes[favourite]]
    attempt = Attempt(Namespace(b"n" * 32), KEYS, 10.0)

    def ask(peer: Any, asked: Any) -> None:
        peer.asked += 1
        if peer.dead:
            attempt.failed(peer, MissReason.NODE_DOWN)
        else:
            answers = peer.acquire(attempt.request(peer, asked, 0.0, sealed=True).keys)
            attempt.answered(peer, asked, ADDRESS, answers)

    if ahead:
        ask(favourites[0], attempt.all_of(favourites[0]))
    if (known := attempt.num_promised) < LENGTH:
        attempt.know(known, holders[known:], favourites)
    for _ in range(rounds):
        for peer, asked in attempt.next_round().items():
            ask(peer, asked)
    return attempt.outcome(), attempt


def give_back(attempt: Attempt, kept: tuple[Copy, ...]) -> None:
    peer: Any
    for peer, release in attempt.surplus(kept):
        peer.leased -= set(release.keys or peer.leased)


@given(
    claims,
    st.tuples(lengths, lengths, lengths),
    st.sets(st.sampled_from(NAMES)),
    st.sampled_from(NAMES),
    st.booleans(),
)
def test_what_is_kept_is_a_leased_prefix_and_nothing_else_stays_leased(
    claimed, held, dead, favourite, ahead
) -> None:
    """Mutants: keep a key behind the gap; forget the surplus; ask a dead node again."""
    nodes = {
        name: Node(name, length, dead=name in dead, closed=True)
        for name, length in zip(NAMES, held, strict=True)
    }
    (kept, reason), attempt = run(nodes, claimed, favourite, rounds=10, ahead=ahead)
    assert [copy.key for copy in kept] == KEYS[: len(kept)]
    assert (reason is None) == (len(kept) == LENGTH)
    owners: Any = {lease: peer for peer, lease in attempt.leases.items()}
    assert all(copy.key in owners[copy.lease].leased for copy in kept)
    give_back(attempt, kept)
    assert sum(len(node.leased) for node in nodes.values()) == len(kept)
    assert all(nodes[name].asked <= 1 for name in dead)


@given(claims, st.tuples(lengths, lengths, lengths), st.sampled_from(NAMES), st.booleans())
def test_no_prefix_that_is_to_be_had_is_missed(claimed, held, favourite, ahead) -> None:
    """With rounds enough, a key is only missed if no node that is said to hold it does. Mutant: one round only.

    A node that is asked ahead may know better than what is said.
    """
    nodes = {name: Node(name, n, dead=False, closed=True) for name, n in zip(NAMES, held, strict=True)}
    (kept, _), _ = run(nodes, claimed, favourite, rounds=10, ahead=ahead)
    best = nodes[favourite].length if ahead else 0
    while best < LENGTH and any(nodes[name].length > best for name in claimed[best]):
        best += 1
    assert len(kept) == best


def test_a_node_in_trouble_is_asked_only_when_nobody_else_can_help() -> None:
    nodes = {name: Node(name, LENGTH, dead=False, closed=name == "B") for name in NAMES}
    run(nodes, [["A", "B"]] * LENGTH, "A", rounds=3)
    assert (nodes["A"].asked, nodes["B"].asked) == (0, 1)
    run(nodes, [["A"]] * LENGTH, "A", rounds=3)
    assert nodes["A"].asked == 1, "so that its breaker says why"


def test_the_reason_is_that_of_the_first_key_that_is_missing() -> None:
    nodes = {"A": Node("A", 3, dead=False, closed=True)}
    (kept, reason), _ = run(nodes, [["A"]] * LENGTH, "A", rounds=3)
    assert (len(kept), reason) == (3, MissReason.EVICTED)
    (kept, reason), _ = run(nodes, [["A"]] * 2 + [[]] * (LENGTH - 2), "A", rounds=3)
    assert (len(kept), reason) == (2, MissReason.NEVER_STORED)


def test_a_cancelled_attempt_gives_every_lease_back_even_one_without_an_answer() -> None:
    nodes: Any = {"A": Node("A", 3, dead=False, closed=True)}
    attempt = Attempt(Namespace(b"n" * 32), KEYS, 10.0)
    attempt.know(0, [[nodes["A"]]] * LENGTH, [])
    attempt.next_round()
    ((peer, release),) = attempt.surplus(())
    assert (peer, release.keys) == (nodes["A"], ())
    assert release.lease == attempt.leases[peer] != LeaseId(b"")
