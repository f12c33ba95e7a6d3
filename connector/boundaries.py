"""Boundaries: where a prompt of a model of several kinds can be taken up again, and what that takes. Pure.

A boundary is the end of a link: the end of a chunk, or of the tail. A hit there needs the chain up to it and the
pieces that each kind needs (`connector.kinds`). It never is the end of the whole prompt: neither a window nor a state
can be taken back by the token that vLLM must compute.

Pieces are worth saving for boundaries at which prompts are likely to be taken up again: the end of the tail (the
same prompt), the last end of a chunk (a prompt that goes on), and one in so many tokens (prompts that share their
beginning).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from connector.keys import Link
from connector.kinds import Kind, Reach
from kvstore.core import Key, chunk_key


def with_pieces(links: Sequence[Link], kinds: Sequence[Kind]) -> tuple[Link, ...]:
    """The links with the pieces of all kinds but the full one."""
    return tuple(
        replace(link, pieces=tuple(_piece(link, number, kinds[number]) for number in range(1, len(kinds))))
        for link in links
    )


def _piece(link: Link, number: int, kind: Kind) -> Link:
    key = chunk_key(link.key, (), [("kind", kind.name, number)])
    start = max(link.start, kind.first_token(link.stop))
    return Link(key, link.key, link.depth + 1, start, link.stop, link.tail, kind=number)


def needed(links: Sequence[Link], last: int, kinds: Sequence[Kind], computed: int = 0) -> list[Link]:
    """The pieces that a hit at the end of `links[last]` needs, beyond the `computed` tokens that the engine has.

    A state is always needed: the engine's own is an earlier one.
    """
    end = links[last].stop
    found: list[Link] = []
    for number in range(1, len(kinds)):
        first = max(kinds[number].first_token(end), computed)
        at = last
        while at >= 0 and links[at].stop > first:
            found.append(links[at].pieces[number - 1])
            at -= 1
    return found


def longest_hit(
    links: Sequence[Link], kinds: Sequence[Kind], present: Callable[[Key], bool], computed: int = 0
) -> int:
    """How many links the longest hit has beyond `computed` tokens; 0: there is none.

    It is the largest boundary within the longest chain that is present, for which every kind's pieces are.
    """
    length = next((at for at, link in enumerate(links) if not present(link.key)), len(links))
    for last in reversed(range(length)):
        if links[last].stop <= computed:
            return 0
        if all(present(piece.key) for piece in needed(links, last, kinds, computed)):
            return last + 1
    return 0


def worth_saving(
    links: Sequence[Link], kinds: Sequence[Kind], retention_tokens: int, *, states: bool = False
) -> frozenset[Key]:
    """The keys of the pieces of windows and local attention that are worth saving.

    Args:
        links: of a prompt, with their pieces.
        kinds: of the model.
        retention_tokens: one boundary in so many tokens; 0: none but the last ones.
        states: those of states at the same boundaries, too, as if they were not vLLM's to choose.
    """
    return frozenset(
        piece.key
        for last in _boundaries(links, retention_tokens)
        for piece in needed(links, last, kinds)
        if states or kinds[piece.kind].reach is not Reach.STATE
    )


def _boundaries(links: Sequence[Link], retention_tokens: int) -> Iterator[int]:
    for at, link in enumerate(links):
        due = retention_tokens and link.start // retention_tokens != link.stop // retention_tokens
        if at == len(links) - 1 or links[at + 1].tail or due:
            yield at
