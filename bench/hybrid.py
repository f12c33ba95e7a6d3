"""What models of several kinds of KV store and move, beside storing everything of every layer.

stored: bytes that a cold prompt adds to the store, per prompt token. moved: bytes that a fresh engine pulls for the
same prompt. all blocks: the same with every block of every layer, as a store would that takes windows for full
attention. Counted from what the connector plans: there is nothing to measure.

    python bench/hybrid.py [--json]
"""

from collections.abc import Sequence
from typing import NamedTuple

from bench._harness import Report, Samples, Wrong, parse_arguments, run
from connector.boundaries import longest_hit, needed, with_pieces, worth_saving
from connector.keys import Link
from connector.kinds import Kind, Reach
from kvstore.core import Key, chunk_key

CHUNK_TOKENS, BLOCK_TOKENS, RETENTION_TOKENS = 256, 16, 2_048
PROMPT_TOKENS = 8_000
AIM_VS_ALL = 0.6


class Pattern(NamedTuple):
    """Layers of a model, and bytes of one token in one of them."""

    name: str
    full: int
    local: int
    kind: Kind
    token_bytes: int


def local(reach: Reach, tokens: int) -> Kind:
    """The kind of the layers that do not attend to all tokens."""
    return Kind(f"{reach}({tokens})", reach, tokens, (1,), BLOCK_TOKENS)


FULL = Kind("full", Reach.FULL, 0, (0,), BLOCK_TOKENS)
PATTERNS = (
    Pattern("Gemma-3 27B, 5:1, window 1,024", 10, 52, local(Reach.WINDOW, 1_024), 16 * 2 * 128 * 2),
    Pattern("Gemma-3 1B, 5:1, window 512", 4, 22, local(Reach.WINDOW, 512), 1 * 2 * 256 * 2),
    Pattern("gpt-oss 120B, 1:1, window 128", 18, 18, local(Reach.WINDOW, 128), 8 * 2 * 64 * 2),
    Pattern("Llama-4 Scout, 3:1, chunks of 8,192", 12, 36, local(Reach.CHUNKED, 8_192), 8 * 2 * 128 * 2),
)


def chain(num_tokens: int) -> list[Link]:
    """The links of a prompt."""
    usable, links, parent = num_tokens - 1, list[Link](), Key(bytes(32))
    whole = usable // CHUNK_TOKENS * CHUNK_TOKENS
    ends = [
        *range(CHUNK_TOKENS, whole + 1, CHUNK_TOKENS),
        *([usable // BLOCK_TOKENS * BLOCK_TOKENS] if usable - whole >= BLOCK_TOKENS else []),
    ]
    start = 0
    for depth, stop in enumerate(ends):
        key = chunk_key(parent, range(start, stop))
        links.append(Link(key, parent, depth, start, stop, stop - start < CHUNK_TOKENS))
        start, parent = stop, key
    return links


def count(pattern: Pattern, num_tokens: int) -> dict[str, float]:
    """Bytes per prompt token that are stored, and moved, and would be of all blocks."""
    kinds = (FULL, pattern.kind)
    links = with_pieces(chain(num_tokens), kinds)
    saved = worth_saving(links, kinds, RETENTION_TOKENS)
    last = longest_hit(links, kinds, (saved | {link.key for link in links}).__contains__)
    if last != len(links):
        raise Wrong(f"{pattern.name}: what is saved does not serve the same prompt")
    pieces = [piece for link in links for piece in link.pieces if piece.key in saved]
    return {
        "stored": bytes_of(pattern, links, pieces) / num_tokens,
        "moved": bytes_of(pattern, links, needed(links, last - 1, kinds)) / num_tokens,
        "all blocks": (pattern.full + pattern.local) * pattern.token_bytes * links[-1].stop / num_tokens,
    }


def bytes_of(pattern: Pattern, links: Sequence[Link], pieces: Sequence[Link]) -> int:
    """Of these chunks, and these pieces."""
    return pattern.token_bytes * (
        pattern.full * sum(link.stop - link.start for link in links)
        + pattern.local * sum(piece.stop - piece.start for piece in pieces)
    )


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    report = Report("Bytes of hybrid models per prompt token", "B")
    ratios = {}
    for pattern in PATTERNS:
        for num_tokens in (1_000, PROMPT_TOKENS, 64_000):
            values = {name: Samples((value,)) for name, value in count(pattern, num_tokens).items()}
            name = f"{pattern.name}, {num_tokens:,} tokens"
            ratios[name] = report.row(name, values, against=("stored", "all blocks"))
    report.aim(
        "bytes_vs_all_blocks",
        ratios[f"{PATTERNS[0].name}, {PROMPT_TOKENS:,} tokens"],
        AIM_VS_ALL,
        "x",
        at_most=True,
    )
    report.note(
        f"chunks of {CHUNK_TOKENS}, blocks of {BLOCK_TOKENS}, retention_tokens {RETENTION_TOKENS:,}; bf16, no TP"
    )
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
