"""Links on their way into the store: which ones a step completes, and what protects them until they are over.

A link is offered once its tokens are computed for good, unless it is known to be stored or on its way already. From
then on its blocks have references (`connector.pins`), until its save has ended one way or the other. Beyond the
bound of references a link waits for a later step of its request, or is dropped with it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connector.keys import Link
from connector.pieces import Pieces
from connector.pins import Pins
from connector.requests import RequestState
from connector.shared import Shared
from connector.stats import Cause
from kvstore.core import Geometry, Key, limits

Tables = Sequence[Sequence[int]]
"""A request's blocks in token order, by KV cache group."""


@dataclass(slots=True)
class Item:
    """A link on its way, and the blocks that it holds references on until it is `over`. `offer` is its number, if the
    workers were told that it comes."""

    link: Link
    blocks: tuple[int, ...]
    size_bytes: int
    cold: bool
    request: str
    over: bool = False
    offer: int = 0

    @property
    def tokens(self) -> int:
        """How many it is of."""
        return self.link.stop - self.link.start


class Offers:
    """All links of this engine on their way.

    Attributes:
        geometries: the shapes of objects, by kind.
        placed: by key, the id of the node that a link goes to; empty where that is open.
    """

    def __init__(self, shared: Shared) -> None:
        self.geometries: Sequence[Geometry] = ()
        self.pins = Pins(shared.config.pinned_share)
        self.placed: dict[Key, str] = {}
        self._shared = shared
        self._known = shared.known
        self._stats = shared.stats
        self._pieces = Pieces(shared)

    def completed_by(self, scheduler_output: Any, states: Mapping[str, RequestState]) -> Iterator[Item]:
        """What a step completes, at most what one reservation may ask for, with references taken."""
        left = limits.BATCH_KEYS_MAX
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            state = states.get(request_id)
            if state is None or state.links is None or state.epoch != self._shared.epoch:
                continue
            computed = state.request.num_computed_tokens + num_tokens
            if computed < state.rests_until:
                continue
            for item in self._completed(state, computed, scheduler_output, left):
                left -= 1
                yield item
        for state, piece, blocks in self._pieces.completed_by(scheduler_output, states):
            if left > 0 and self.is_new(piece):
                taken = self.take(state, piece, blocks)
                if taken is None:  # no later step has these blocks
                    tokens = piece.stop - piece.start
                    self._stats.drop(Cause.PINNED_SHARE, [tokens], state.request_id)
                else:
                    left -= 1
                    yield taken

    def _completed(self, state: RequestState, computed: int, output: Any, items_max: int) -> Iterator[Item]:
        """The links that are whole when so many tokens are computed."""
        stop = state.grow(computed)
        link = state.next_link
        if link is not None and link.stop <= stop:
            tables = output.kv_connector_block_state.get_block_ids(state.request_id)
            yield from self._up_to(state, stop, tables, items_max)
            link = state.next_link
        if link is None or link.stop > stop:
            state.rest()

    def _up_to(self, state: RequestState, stop: int, tables: Tables, items_max: int) -> Iterator[Item]:
        """The links that end within the first `stop` tokens, as far as references can be taken."""
        while items_max > 0 and (link := state.next_link) is not None and link.stop <= stop:
            if self.is_new(link):
                item = self.take(state, link, self._blocks(link, tables))
                if item is None:
                    return
                items_max -= 1
                yield item
            state.offered += 1

    def ended_by(self, state: RequestState, tables: Tables) -> Iterator[Item]:
        """What the end of a request completes. Its blocks go: what is not offered now never will be.

        Args:
            state: the request.
            tables: its blocks, by group.
        """
        num_blocks = min(map(len, tables), default=0)
        stop = state.grow(min(state.request.num_computed_tokens, num_blocks * self._shared.block_tokens))
        if state.growth is not None and (end := state.growth.end(stop)) is not None:
            state.grown.append(end)
        yield from self._up_to(state, stop, tables, limits.BATCH_KEYS_MAX)
        if left := [*(state.links or ()), *state.grown][state.offered :]:
            tokens = [link.stop - link.start for link in left]
            self._stats.drop(Cause.PINNED_SHARE, tokens, state.request_id)

    def is_new(self, link: Link) -> bool:
        """Whether the link is neither under way nor known to be stored."""
        return link.key not in self.placed and self._known.node_of(link.key) is None

    def _blocks(self, link: Link, tables: Tables) -> tuple[int, ...]:
        size = self._shared.block_tokens
        groups = self._shared.kinds[link.kind].groups
        return tuple(block for g in groups for block in tables[g][link.start // size : link.stop // size])

    def take(self, state: RequestState, link: Link, blocks: tuple[int, ...]) -> Item | None:
        """The link with references on its blocks (those of each group in turn); None beyond their bound."""
        if not self.pins.take(blocks):
            return None
        self.placed[link.key] = ""
        tokens = self._shared.kinds[link.kind].object_tokens(link.start, link.stop)
        size_bytes = self.geometries[link.kind].object_bytes(tokens)
        return Item(link, blocks, size_bytes, link.tail or state.hints.save_cold, state.request_id)

    def let_go(self, item: Item, *, stored_at: str | None = None) -> None:
        """Ends an item: gives its references back, once."""
        if item.over:
            return
        item.over = True
        self.pins.give_back(item.blocks)
        self.placed.pop(item.link.key, None)
        if stored_at is not None:
            self._known.add(item.link.key, stored_at)

    def drop(self, items: Iterable[Item], cause: str) -> None:
        """These are not saved."""
        ended = [item for item in items if not item.over]
        if ended:
            self._stats.drop(cause, [item.tokens for item in ended], ended[0].request)
        for item in ended:
            self.let_go(item)

    def roll_back(self, state: RequestState) -> set[Key]:
        """The keys of this request that were offered and rest on tokens that are not computed any more."""
        offered = [*(state.links or ()), *state.grown][: state.offered]
        computed = state.request.num_computed_tokens
        invalid = [at for at, link in enumerate(offered) if link.stop > computed]
        if invalid:
            state.offered, state.rests_until = invalid[0], 0
            state.pieced = min(state.pieced, invalid[0])
        links = [offered[at] for at in invalid]
        return {one.key for link in links for one in (link, *link.pieces)}
