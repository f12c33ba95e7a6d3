"""Keys of a request: its prompt as a chain of chunks and a tail, each named by the tokens up to its end.

    prompt:  |     chunk 0     |     chunk 1     | tail    |rest|
                                                 whole engine blocks, less than a chunk; the rest (less
                                                 than a block) is never stored and always computed

What besides tokens decides a chunk's KV goes into its key as canonical extras, independent of the engine's
block size: ("lora", digest of the adapter's files) and ("salt", text) in the first link, from where the
chain carries them on; ("mm", identifier, offset within the link) for every multimodal item that touches the
link; ("embeds", digest) for prompts given as embeddings.
"""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.compat import logger, tensor_data
from connector.identity import WeightsUnknown, adapter_digest
from kvstore.core import Extra, Key, Namespace, chunk_key

__all__ = ["AdapterDigests", "Chain", "Link", "links_of"]

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """One link of a prompt's chain: the tokens [start, stop). `tail`: shorter than a chunk, stored cold.

    Models of several kinds of layers (`connector.kinds`) have `pieces` at it, one of each other kind: links, too,
    of that `kind`. The tokens of a piece may be none.
    """

    key: Key
    parent: Key
    depth: int
    start: int
    stop: int
    tail: bool
    kind: int = 0
    pieces: tuple["Link", ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """How one request's tokens are cut and named.

    Args:
        request: vLLM's request.
        namespace: first parent of the chain.
        chunk_tokens: tokens of a chunk, a multiple of `block_tokens`.
        block_tokens: the engine's block size.
        adapter: digest of the LoRA adapter's files, empty without one.
    """

    request: Any
    namespace: Namespace
    chunk_tokens: int
    block_tokens: int
    adapter: str = ""

    def link(self, before: Link | None, start: int, stop: int) -> Link:
        """The tokens [start, stop), behind the link that ends at `start` (None: at the beginning)."""
        parent = Key(bytes(self.namespace)) if before is None else before.key
        depth = 0 if before is None else before.depth + 1
        extras = _extras(self.request, start, stop, self.adapter)
        key = chunk_key(parent, self.request.all_token_ids[start:stop], extras)
        return Link(key, parent, depth, start, stop, tail=stop - start < self.chunk_tokens)

    def prompt(self, num_tokens: int | None = None) -> tuple[Link, ...]:
        """The links of the request's prompt (or of its first `num_tokens`), in order. About 10 us per chunk of 256
        tokens."""
        num_tokens = self.request.num_prompt_tokens if num_tokens is None else num_tokens
        links = list(self._chunks(num_tokens))
        start = len(links) * self.chunk_tokens
        stop = num_tokens - num_tokens % self.block_tokens
        if stop > start:
            links.append(self.link(links[-1] if links else None, start, stop))
        return tuple(links)

    def resumed_prompt(self, generated: int) -> tuple[Link, ...]:
        """The same for a prompt whose last `generated` tokens are the answer of an engine that has died.

        Its tail is in pieces of one engine block, as that engine has saved them; so is the last whole chunk if it
        holds generated tokens, because that chunk may not have come into the store any more.
        """
        num_tokens = self.request.num_prompt_tokens
        chunks = list(self._chunks(num_tokens))
        in_pieces = bool(chunks) and chunks[-1].stop > num_tokens - generated
        links = chunks[:-1] if in_pieces else list(chunks)
        for start in range(len(links) * self.chunk_tokens, num_tokens, self.block_tokens):
            if start + self.block_tokens <= num_tokens:
                whole, at = divmod(start, self.chunk_tokens)
                before = links[-1] if at else chunks[whole - 1] if whole else None
                links.append(self.link(before, start, start + self.block_tokens))
        return tuple(links)

    def _chunks(self, num_tokens: int) -> Iterator[Link]:
        """The whole chunks among the first `num_tokens`."""
        before: Link | None = None
        for stop in range(self.chunk_tokens, num_tokens + 1, self.chunk_tokens):
            before = self.link(before, stop - self.chunk_tokens, stop)
            yield before


def links_of(
    request: Any, namespace: Namespace, chunk_tokens: int, block_tokens: int, adapter: str = ""
) -> tuple[Link, ...]:
    """The links of a request's prompt; see `Chain`."""
    return Chain(request, namespace, chunk_tokens, block_tokens, adapter).prompt()


def _extras(request: Any, start: int, stop: int, adapter: str) -> list[Extra]:
    extras: list[Extra] = []
    if start == 0 and adapter:
        extras.append(("lora", adapter))
    if start == 0 and request.cache_salt:
        extras.append(("salt", str(request.cache_salt)))
    for item in request.mm_features:
        first, length = item.mm_position.offset, item.mm_position.length
        if first < stop and first + length > start:
            extras.append(("mm", str(item.identifier), int(first) - start))
    if request.prompt_embeds is not None:
        embeds = tensor_data(request.prompt_embeds[start:stop])
        extras.append(("embeds", hashlib.sha256(embeds).hexdigest()))
    return extras


class AdapterDigests:
    """Digests of LoRA adapters' files, each read once per adapter that the engine loads.

    The digest must be that of the weights in the engine. An adapter whose files change afterwards without
    `load_inplace` has no digest any more: what the engine computes with could be either.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str], tuple[str, str]] = {}

    def digest(self, lora: Any) -> str | None:
        """The digest, or None when there is none to be had. Reads files: never on the engine's thread."""
        folder = Path(lora.lora_path)
        files = sorted(path for path in folder.glob("*") if path.is_file())
        signature = repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
        identity = (lora.lora_int_id, lora.lora_path)
        with self._lock:
            seen = self._known.get(identity)
            if seen is None or (lora.load_inplace and seen[0] != signature):
                try:
                    seen = self._known[identity] = (signature, adapter_digest(folder))
                except WeightsUnknown as error:
                    log.warning("%s; its KV is not shared", error)
                    return None
        return seen[1] if seen[0] == signature else None
