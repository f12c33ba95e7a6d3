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

__all__ = ["AdapterDigests", "Link", "links_of"]

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """One link of a prompt's chain: the tokens [start, stop). `tail`: shorter than a chunk, stored cold."""

    key: Key
    parent: Key
    depth: int
    start: int
    stop: int
    tail: bool


def links_of(
    request: Any, namespace: Namespace, chunk_tokens: int, block_tokens: int, adapter: str = ""
) -> tuple[Link, ...]:
    """The links of a request's prompt, in order. About 10 us per chunk of 256 tokens.

    Args:
        request: vLLM's request; only its prompt is looked at.
        namespace: first parent of the chain.
        chunk_tokens: tokens of a chunk, a multiple of `block_tokens`.
        block_tokens: the engine's block size.
        adapter: digest of the LoRA adapter's files, empty without one.
    """
    tokens = request.all_token_ids[: request.num_prompt_tokens]
    links: list[Link] = []
    parent = Key(bytes(namespace))
    for depth, (start, stop) in enumerate(_cuts(len(tokens), chunk_tokens, block_tokens)):
        key = chunk_key(parent, tokens[start:stop], _extras(request, start, stop, adapter))
        links.append(Link(key, parent, depth, start, stop, tail=stop - start < chunk_tokens))
        parent = key
    return tuple(links)


def _cuts(num_tokens: int, chunk_tokens: int, block_tokens: int) -> Iterator[tuple[int, int]]:
    chunks_end = num_tokens - num_tokens % chunk_tokens
    for start in range(0, chunks_end, chunk_tokens):
        yield start, start + chunk_tokens
    tail_end = num_tokens - num_tokens % block_tokens
    if tail_end > chunks_end:
        yield chunks_end, tail_end


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
