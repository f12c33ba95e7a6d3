"""What the scheduler half remembers of a request, from its arrival to its end."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from connector.compat import was_preempted
from connector.control import Found, Promise
from connector.growth import Growth
from connector.hints import Hints
from connector.keys import Link
from connector.leases import Lease
from kvstore.core import Key, MissReason


@dataclass(frozen=True, slots=True)
class HandOff:
    """A prefill engine's word, carried by the request: the first `tokens` are stored, or about to be.

    `nodes` are ids of the nodes that hold them.
    """

    tokens: int
    nodes: tuple[str, ...]


@dataclass(slots=True)
class Ask:
    """One admission's question to the store: from the scheduler's first ask until blocks are allocated.

    Args:
        lookup: under way or answered.
        presence: the same, of keys that are no chain.
        absent: keys that could not be promised.
        acquire: under way; None before, and when it has been answered.
        lease: what is promised, of what was `wanted`: links of the chain, then pieces.
        computed: the local hit that was presented last; None: never asked.
        refused: the answer is "nothing" from now on; `reason` says why not more.
        wait_until_s: when the request will not be held back any longer for the question under way.
    """

    lookup: "Future[Found] | None" = None
    presence: "Future[Sequence[bool] | None] | None" = None
    absent: set[Key] = field(default_factory=set)
    acquire: "Future[Promise] | None" = None
    acquires: int = 0
    asked_s: float = 0.0
    lease: Lease | None = None
    wanted: tuple[Link, ...] = ()
    computed: int | None = None
    refused: bool = False
    reason: MissReason | None = None
    wait_until_s: float | None = None


@dataclass(slots=True)
class RequestState:
    """One request. `links` are its keys, None until they can be computed; `epoch` names the namespace they are of.

    Args:
        foreign: why its hand-off could not be used, if that explains misses.
        load: the job that loads for it, if one is under way.
        no_load: never load again for this request, and why.
        hints: what it says of its KV.
        growth: the links behind its prompt; None where only prompts are saved.
        grown: those of them that have become whole, in order.
        worth: the keys of those of its windows' pieces that are worth saving.
        pieced: the pieces of the links before this one were offered, or need not be.
        offered: the links before this one (of `links`, then of `grown`) were offered to the store, or need not be.
        rests_until: with fewer tokens computed no other link is whole; so most steps need not look.
        adapter: digest of its LoRA adapter, on its way.
    """

    request: Any
    links: tuple[Link, ...] | None = None
    epoch: int = -1
    handoff: HandOff | None = None
    foreign: MissReason | None = None
    adapter: "Future[str | None] | None" = None
    ask: Ask = field(default_factory=Ask)
    load: int | None = None
    no_load: MissReason | None = None
    hints: Hints = Hints()  # noqa: RUF009 - immutable
    growth: Growth | None = None
    grown: list[Link] = field(default_factory=list)
    worth: frozenset[Key] = frozenset()
    pieced: int = 0
    offered: int = 0
    rests_until: float = 0

    def void(self, epoch: int) -> None:
        """Its KV is of different weights in part, from now on: it is never saved, and nothing is loaded for it."""
        self.ask, self.handoff, self.offered, self.pieced = Ask(), None, 0, 0
        self.links, self.epoch, self.no_load = (), epoch, MissReason.MANIFEST_DIFFERS
        self.growth, self.grown, self.rests_until = None, [], 0

    @property
    def next_link(self) -> Link | None:
        """The first that was not offered yet, if there is one by now."""
        links = self.links or ()
        if self.offered < len(links):
            return links[self.offered]
        behind = self.offered - len(links)
        return self.grown[behind] if behind < len(self.grown) else None

    def grow(self, num_tokens: int) -> int:
        """Takes note of the links that are whole now that `num_tokens` are computed; how many of these are final."""
        if self.growth is None:
            return min(num_tokens, self.prompt_tokens)
        final = min(num_tokens, self.growth.final_tokens)
        self.grown += self.growth.grow(final)
        return final

    def rest(self) -> None:
        """Everything that is whole was offered."""
        link = self.next_link
        ahead = math.inf if self.growth is None else self.growth.next_stop
        self.rests_until = ahead if link is None else min(link.stop, ahead)

    @property
    def request_id(self) -> str:
        """vLLM's name of the request."""
        return str(self.request.request_id)

    @property
    def was_preempted(self) -> bool:
        """Whether it asks again because its blocks were taken from it."""
        return was_preempted(self.request)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)
