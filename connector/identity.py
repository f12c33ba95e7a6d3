"""What makes the KV caches of two engines the same: weights, model configuration, tiles. Paths do not matter.

The fingerprint of weights covers file names, sizes, safetensors headers and *samples*: 4 KiB from both ends of
every tensor and one for every 8 MiB inside it (at least one). Training touches nearly every element of every
tensor it does not freeze, and so do merging an adapter, editing by a low-rank update, quantising and scaling;
any of these changes the samples. Up to 1 GiB of weights are read in full, where no sampling can miss anything.
What sampling can miss is an edit of a few rows in the middle of a large tensor, such as new embeddings for
reserved tokens and nothing else: give such a model a `weights_version` of its own.

Draft layers of speculative decoding have KV in the same blocks and objects, so what makes drafts is part of all of
this, like a part of the model.

Of the model's configuration everything takes part but what is known not to change KV: a field that nobody
thought of then costs hits, which `differences` of two manifests explains, and not wrong tokens.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from connector.compat import ModelFacts
from connector.kinds import Kind
from connector.shape import Whole
from kvstore.core import BadConfiguration, Geometry, Manifest
from kvstore.core import Kind as KindOfObjects
from kvstore.core.limits import GIB, KIB, MIB

SAMPLE_BYTES = 4 * KIB
SAMPLE_EVERY_BYTES = 8 * MIB  # inside a tensor
SAMPLE_EVERY_BYTES_OPAQUE = MIB  # inside a file whose tensors are not known
READ_IN_FULL_BYTES = GIB
READERS = 8

_TAG = b"kvstore.weights.v1\0"
_PIECE_BYTES = 4 * MIB

_PATTERNS = {  # what vLLM loads for each load format: the first pattern that matches anything
    "auto": ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
}

_IRRELEVANT = frozenset(  # fields of a model's configuration, at any depth, that do not change KV
    {
        "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range",
        "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
        "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    }
)  # fmt: skip
_IRRELEVANT_OF_DRAFTS = _IRRELEVANT | {"max_position_embeddings"}  # vLLM puts its max_model_len there
DRAFT_METHOD = "drafts.engine.method"
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope", "su"})  # rope that vLLM chooses by max_model_len
_LONGEST_VALUE = 256  # longer values of the configuration are put into the manifest as their digest

Scalar = str | int | float | bool | None


class WeightsUnknown(BadConfiguration):
    """The weights cannot be told apart from others by their files."""


def build_manifest(
    facts: ModelFacts, weights: str, whole: Whole, chunk_tokens: int, kinds: Sequence[Kind] = ()
) -> Manifest:
    """The manifest of an engine.

    Args:
        facts: what it serves.
        weights: from `weights_identity`.
        whole: from the worker halves.
        chunk_tokens: of a chunk.
        kinds: of the model's KV, the full one first; nothing is as good as that one alone.
    """
    geometry = whole.shape.geometry
    return Manifest(
        weights=weights,
        model=model_identity(facts),
        kv_dtype=whole.kv_dtype,
        tile_format=whole.tile_format,
        chunk_tokens=chunk_tokens,
        unit_tokens=geometry.unit_tokens,
        lanes=_lanes(geometry),
        kinds=tuple(
            KindOfObjects(
                name=kind.name,
                tokens=kind.tokens_max(chunk_tokens),
                unit_tokens=shape.geometry.unit_tokens,
                lanes=_lanes(shape.geometry),
            )
            for kind, shape in zip(kinds[1:], whole.shape.kinds, strict=True)
        ),
    )


def _lanes(geometry: Geometry) -> tuple[tuple[int, int, int], ...]:
    return tuple((layers, heads, unit_bytes) for layers, heads, unit_bytes in geometry.lanes)


def model_identity(facts: ModelFacts) -> dict[str, Scalar]:
    """The configuration as flat, sorted names, without what does not change KV and without nulls."""
    values = dict([*_flat("", facts.config, _IRRELEVANT), *_flat("engine.", facts.engine, frozenset())])
    if (drafts := facts.drafts) is not None:
        values |= _flat("drafts.", drafts.config, _IRRELEVANT_OF_DRAFTS)
        values |= _flat("drafts.engine.", drafts.engine, frozenset())
    rope = {value for name, value in values.items() if name.rpartition(".")[2] in {"rope_type", "type"}}
    if not rope.isdisjoint(_ROPE_BY_LENGTH):
        values["engine.max_model_len"] = facts.max_model_len
    return dict(sorted(values.items()))


def _flat(prefix: str, values: Mapping[str, Any], irrelevant: frozenset[str]) -> Iterator[tuple[str, Scalar]]:
    for name, value in values.items():
        if value is None or str(name) in irrelevant or str(name).startswith("_"):
            continue
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value, irrelevant)
        else:
            yield f"{prefix}{name}", _scalar(value)


def _scalar(value: Any) -> Scalar:
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# --- weights ------------------------------------------------------------------------------------------


def weights_identity(facts: ModelFacts, weights_version: str = "") -> str:
    """What the manifest says of the weights; seconds for 100 GB, so not on the engine's thread.

    Raises:
        WeightsUnknown: no local files of a known kind, or files that cannot be read.
    """
    if weights_version:
        return f"version:{weights_version}"
    if facts.drafts is not None and facts.drafts.weights != facts.weights:
        return f"{weights_identity(replace(facts, drafts=None))} drafts:{weights_identity(facts.drafts)}"
    if facts.load_format == "dummy":  # vLLM draws them from a fixed seed, rank by rank
        return "dummy:tp{}pp{}".format(*facts.ranks)
    return weights_fingerprint(facts.weights, facts.load_format)


def weights_fingerprint(weights: Path, load_format: str = "auto") -> str:
    """Digest of the weights' files. Raises as `weights_identity`."""
    try:
        files = sorted(_files(weights, load_format), key=lambda file: file.name)
        sizes = [file.stat().st_size for file in files]
        in_full = sum(sizes) <= READ_IN_FULL_BYTES
        with ThreadPoolExecutor(READERS, "kvstore-weights") as pool:
            digests = list(pool.map(lambda file: _digest(file, in_full=in_full), files))
    except OSError as error:
        raise WeightsUnknown(_advice(f"{weights} cannot be read: {error.strerror}")) from error
    total = hashlib.sha256(_TAG)
    for file, size, digest in zip(files, sizes, digests, strict=True):
        total.update(json.dumps([file.name, size]).encode() + digest)
    return f"files:{total.hexdigest()}"


def adapter_digest(adapter: Path) -> str:
    """Digest of all bytes of a LoRA adapter's files.

    Raises:
        WeightsUnknown: there are none, or they cannot be read.
    """
    try:
        files = sorted(
            file
            for pattern in ("adapter_config.json", "adapter_model.*", "new_embeddings.*")
            for file in adapter.glob(pattern)
        )
        if len(files) < 2:
            raise WeightsUnknown(
                f"{adapter} is no LoRA adapter: adapter_config.json and adapter_model.* expected"
            )
        total = hashlib.sha256(b"kvstore.adapter.v1\0")
        for file in files:
            with file.open("rb") as data:
                total.update(json.dumps(file.name).encode() + hashlib.file_digest(data, "sha256").digest())
    except OSError as error:
        raise WeightsUnknown(f"the LoRA adapter {adapter} cannot be read: {error.strerror}") from error
    return total.hexdigest()


def _advice(reason: str) -> str:
    return f"{reason}; set weights_version in kv_connector_extra_config to name these weights yourself"


def _files(weights: Path, load_format: str) -> list[Path]:
    if weights.is_file():
        return [weights]
    patterns = _PATTERNS.get(load_format)
    if patterns is None:
        raise WeightsUnknown(_advice(f"weights of load format {load_format} have no files to fingerprint"))
    for pattern in patterns:
        if files := list(weights.glob(pattern)):
            return files
    raise WeightsUnknown(_advice(f"no weights ({', '.join(patterns)}) in {weights}"))


def _digest(file: Path, *, in_full: bool) -> bytes:
    """Digest of a file's header and of the samples of its tensors."""
    digest = hashlib.sha256()
    fd = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        for start, length in _ranges(fd, file, size, in_full=in_full):
            digest.update(_read(fd, start, length, file))
    finally:
        os.close(fd)
    return digest.digest()


def _ranges(fd: int, file: Path, size: int, *, in_full: bool) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of what takes part, in the order of the file."""
    if in_full:
        yield from _pieces(0, size)
    elif file.suffix != ".safetensors":
        yield from _samples(0, size, SAMPLE_EVERY_BYTES_OPAQUE)
    else:
        body, tensors = _header(fd, file, size)
        yield from _pieces(0, body)
        for start, stop in tensors:
            yield from _samples(body + start, body + stop, SAMPLE_EVERY_BYTES)


def _header(fd: int, file: Path, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Where the tensors of a safetensors file begin, and their ranges from there on, in order."""
    length = int.from_bytes(_read(fd, 0, 8, file), "little")
    try:
        if length > size - 8:
            raise ValueError("the header is longer than the file")
        entries = json.loads(_read(fd, 8, length, file))
        tensors = [tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__"]
        return 8 + length, sorted((int(start), int(stop)) for start, stop in tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsUnknown(_advice(f"{file} is not a safetensors file: {error}")) from error


def _samples(start: int, stop: int, every: int) -> Iterator[tuple[int, int]]:
    """Both ends and evenly spaced samples between; all of it where samples would nearly touch."""
    size = stop - start
    if size <= 4 * SAMPLE_BYTES:
        yield from _pieces(start, stop)
        return
    yield start, SAMPLE_BYTES
    inside = max(1, size // every)
    for number in range(1, inside + 1):
        yield start + size * number // (inside + 1), SAMPLE_BYTES
    yield stop - SAMPLE_BYTES, SAMPLE_BYTES


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for offset in range(start, stop, _PIECE_BYTES):
        yield offset, min(_PIECE_BYTES, stop - offset)


def _read(fd: int, offset: int, size: int, file: Path) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise WeightsUnknown(_advice(f"{file} ends early"))
    return data
