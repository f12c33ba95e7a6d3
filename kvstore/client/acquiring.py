"""One Acquire over several nodes, as plain state: who is asked for what next, and what came of it.

::

    keys:     0  1  2  3  4  5  6  7
    round 1:  A  A  A  A  B  B  -  -      one Acquire per node, in parallel
    answers:  ok ok ok no ok ok           A had lost key 3 (and with it, by policy, all after it)
    round 2:           C                  another holder of key 3, if there is one
    promise:  0 .. 5                      cut at the first key without a lease; the surplus is given back
"""

from collections.abc import Sequence
from secrets import token_bytes
from typing import cast

from kvstore.client.address import NodeAddress
from kvstore.client.peers import Peer
from kvstore.client.plan import assign, grouped, of_each
from kvstore.client.promise import Copy
from kvstore.core import Key, MissReason, Namespace, limits
from kvstore.wire import Acquire, AcquireAnswer, LeaseId, Miss, OnDisk, Release, Resident

PROMISED = (Resident, OnDisk)  # what is leased


def new_lease() -> LeaseId:
    """A fresh lease id."""
    return LeaseId(token_bytes(limits.LEASE_ID_BYTES))


class Attempt:
    """The state of one Acquire.

    Args:
        namespace: of the keys.
        keys: the chain.
        duration_s: of the leases.
    """

    def __init__(self, namespace: Namespace, keys: Sequence[Key], duration_s: float) -> None:
        self.namespace = namespace
        self.leases: dict[Peer, LeaseId] = {}
        self._keys = keys
        self._duration_s = duration_s
        self._holders: list[Sequence[Peer]] = [()] * len(keys)
        self._favourites: Sequence[Peer] = ()
        self._out: dict[Peer, int] = {}  # who is not asked any more, for this index and later ones
        self._copies: list[Copy | None] = [None] * len(keys)
        self._reasons: dict[int, MissReason] = {}

    def all_of(self, peer: Peer) -> Sequence[int]:
        """The first round may ask one node for everything, before it is known who holds what."""
        self._holders = [(peer,)] * len(self._keys)
        self.leases[peer] = new_lease()
        return range(len(self._keys))

    def know(self, known: int, holders: Sequence[Sequence[Peer]], favourites: Sequence[Peer]) -> None:
        """Learns who holds the keys from `known` on, the first of which may have been asked for in vain.

        A node that lacks a key is asked for later ones all the same if it is said to hold them.

        Args:
            known: how many keys of the chain are promised.
            holders: for each of the others the nodes that may hold it, in order of preference.
            favourites: nodes that are used wherever they may hold a key.
        """
        lacking = {peer for peer, index in self._out.items() if index == known}
        self._out = {peer: index for peer, index in self._out.items() if peer not in lacking}
        first = [peer for peer in holders[0] if peer not in lacking]
        self._holders[known:] = of_each([first, *holders[1:]], _usable)
        self._favourites = favourites

    @property
    def num_promised(self) -> int:
        """Keys of the promised prefix so far."""
        return next((index for index, copy in enumerate(self._copies) if copy is None), len(self._keys))

    def next_round(self) -> dict[Peer, list[int]]:
        """Whom to ask for which keys (indices); empty when nobody could add to the prefix."""
        missing = [index for index, copy in enumerate(self._copies) if copy is None]
        left = self._left if self._out else self._holders.__getitem__
        owners = assign(list(map(left, missing)), self._favourites.__contains__)
        groups = grouped(missing, owners)
        for peer in groups:
            self.leases.setdefault(peer, new_lease())
        return groups

    def request(self, peer: Peer, asked: Sequence[int], wait_s: float, sealed: bool) -> Acquire:
        """What asks a node for these keys."""
        start, end = asked[0], asked[-1] + 1
        neighbours = end - start == len(asked)
        keys = self._keys[start:end] if neighbours else [self._keys[index] for index in asked]
        return Acquire(
            self.namespace,
            tuple(keys),
            self.leases[peer],
            self._duration_s,
            wait_s,
            prefix=True,
            sealed=sealed,
        )

    def answered(
        self, peer: Peer, asked: Sequence[int], address: NodeAddress, answers: Sequence[AcquireAnswer]
    ) -> None:
        """Takes note of a node's answers, which end with the first key that it did not promise."""
        copies, keys, lease = self._copies, self._keys, self.leases[peer]
        for index, answer in zip(asked, answers, strict=False):
            if isinstance(answer, PROMISED):
                copies[index] = Copy(keys[index], address, lease, answer)
            else:
                reason = answer.reason if isinstance(answer, Miss) else MissReason.FILLING
                self._give_up(peer, index, reason)
                return
        if len(answers) < len(asked):
            self._give_up(peer, asked[len(answers)], MissReason.NEVER_STORED)

    def failed(self, peer: Peer, reason: MissReason) -> None:
        """A node did not answer: it is not asked again."""
        for index, copy in enumerate(self._copies):
            if copy is None and peer in self._left(index):
                self._give_up(peer, index, reason)
                self._out[peer] = -1  # for no key at all
                return

    def outcome(self) -> tuple[tuple[Copy, ...], MissReason | None]:
        """The promised prefix and why it ends there."""
        length = self.num_promised
        copies = tuple(cast("list[Copy]", self._copies[:length]))
        if length == len(self._keys):
            return copies, None
        return copies, self._reasons.get(length, MissReason.NEVER_STORED)

    def surplus(self, kept: Sequence[Copy]) -> list[tuple[Peer, Release]]:
        """What gives back every lease, or part of one, that `kept` does not need."""
        needed = {copy.lease for copy in kept}
        releases = []
        for peer, lease in self.leases.items():
            held = [
                copy.key for copy in self._copies[len(kept) :] if copy is not None and copy.lease == lease
            ]
            if lease not in needed:
                releases.append((peer, Release(lease)))
            elif held:
                releases.append((peer, Release(lease, tuple(held))))
        return releases

    def _give_up(self, peer: Peer, index: int, reason: MissReason) -> None:
        """A node that lacks a key is not asked for that key or later ones: chunks go children first."""
        if self._reasons.get(index, MissReason.NEVER_STORED) is MissReason.NEVER_STORED:
            self._reasons[index] = reason
        self._out[peer] = min(index, self._out.get(peer, index))

    def _left(self, index: int) -> Sequence[Peer]:
        """Whom there is to ask for a key."""
        return [peer for peer in self._holders[index] if index < self._out.get(peer, index + 1)]


def _usable(peers: Sequence[Peer]) -> Sequence[Peer]:
    """Those without trouble; all, if all are in trouble."""
    return [peer for peer in peers if peer.breaker.closed] or peers
