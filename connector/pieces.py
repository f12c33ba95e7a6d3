"""Pieces of a step: what windows, local attention and states have in blocks that will soon be gone.

vLLM takes the blocks that have left a window out of a request's table before its next step, so the pieces at the end
of a chunk are offered in the step that completes it. States are offered when vLLM says that this step leaves one at a
boundary: then, and nowhere else, the block that it names holds the state of exactly that boundary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from connector.keys import Link
from connector.kinds import Reach
from connector.requests import RequestState
from connector.shared import Shared

Found = tuple[RequestState, Link, tuple[int, ...]]
"""A piece of a request, and its blocks: those of each group of its kind in turn."""


class Pieces:
    """What steps leave of kinds other than the full one."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def completed_by(self, scheduler_output: Any, states: Mapping[str, RequestState]) -> Iterator[Found]:
        """The pieces that a step completes. Those whose blocks were gone before it are left out."""
        if len(self._shared.kinds) < 2:
            return
        blocks = scheduler_output.kv_connector_block_state
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if state := self._current(states.get(request_id)):
                yield from self._of_windows(state, num_tokens, blocks)
        for request_id, offers in blocks.boundary_state_offloads.items():
            if state := self._current(states.get(request_id)):
                yield from self._of_states(state, offers)

    def _current(self, state: RequestState | None) -> RequestState | None:
        return state if state is not None and state.links and state.epoch == self._shared.epoch else None

    def _of_windows(self, state: RequestState, num_tokens: int, blocks: Any) -> Iterator[Found]:
        assert state.links is not None
        size, stop = self._shared.block_tokens, state.request.num_computed_tokens + num_tokens
        tables: Any = None
        while state.pieced < len(state.links) and state.links[state.pieced].stop <= stop:
            for piece in state.links[state.pieced].pieces:
                if piece.key not in state.worth:
                    continue
                tables = tables or blocks.get_block_ids(state.request_id)
                numbers = range(piece.start // size, piece.stop // size)
                groups = self._shared.kinds[piece.kind].groups
                held = tuple(tables[group][number] for group in groups for number in numbers)
                if 0 not in held:  # the null block
                    yield state, piece, held
            state.pieced += 1

    def _of_states(self, state: RequestState, offers: list[tuple[int, int, int]]) -> Iterator[Found]:
        assert state.links is not None
        held: dict[int, dict[int, int]] = {}  # boundary -> group -> block
        for group, block, boundary in offers:
            held.setdefault(boundary, {})[group] = block
        for link in state.links:
            for piece in link.pieces if link.stop in held else ():
                kind = self._shared.kinds[piece.kind]
                blocks = held[link.stop]
                if kind.reach is Reach.STATE and all(blocks.get(group) for group in kind.groups):
                    yield state, piece, tuple(blocks[group] for group in kind.groups)
