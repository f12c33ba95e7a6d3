"""What makes two engines the same: weights without their path, configuration without what does not matter.

Mutants that were tried and are caught: the path in the fingerprint; sizes, headers, samples inside tensors or at
their ends left out.
"""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig, VllmConfig

from connector import identity
from connector.compat import ModelFacts, _weights_folder, model_facts
from connector.identity import (
    WeightsUnknown,
    adapter_digest,
    build_manifest,
    model_identity,
    weights_fingerprint,
    weights_identity,
)
from connector.metadata import Shape
from connector.shape import Whole
from kvstore.core import Geometry, LaneGroup, differences
from kvstore.core.limits import MIB

GOLDEN_FULL = "files:93516f2d8c75a957ca076a30fe19f614135fd57def94ef1ea6874fe4e9b2c8a1"
GOLDEN_SAMPLED = "files:1b277067a5ea493660157e225ad7532377e074b31ba2915a3a44b0c161ddda7f"


def write_safetensors(file: Path, tensors: Mapping[str, bytes], metadata: str = "pt") -> int:
    """A file of byte tensors; returns where the first tensor begins."""
    header: dict[str, Any] = {"__metadata__": {"format": metadata}}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return 8 + len(text)


def pattern(size: int, seed: int = 0) -> bytes:
    return bytes((seed + n * n // 7) % 251 for n in range(4096)) * (size // 4096) + bytes(size % 4096)


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards with a small and two large tensors."""
    folder = tmp_path / "model"
    write_safetensors(folder / "model-1.safetensors", {"a": pattern(100), "b": pattern(MIB)})
    write_safetensors(folder / "model-2.safetensors", {"c": pattern(MIB, 3)})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files in miniature: these weights are too large to be read in full."""
    monkeypatch.setattr(identity, "READ_IN_FULL_BYTES", 1000)
    monkeypatch.setattr(identity, "SAMPLE_EVERY_BYTES", MIB // 4)


def test_the_fingerprint_is_the_same_everywhere_and_for_ever(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "under another name"
    shutil.copytree(model, copy)
    (copy / "README.md").write_text("not weights")
    assert weights_fingerprint(copy) == weights_fingerprint(model) == GOLDEN_FULL


@pytest.mark.usefixtures("sampled")
def test_the_sampled_fingerprint_is_the_same_for_ever(model: Path) -> None:
    assert weights_fingerprint(model) == GOLDEN_SAMPLED


def test_small_models_are_read_in_full(model: Path) -> None:
    """One flipped bit anywhere makes other weights."""
    file = model / "model-1.safetensors"
    seen = {weights_fingerprint(model)}
    for offset in range(0, file.stat().st_size, 77_777):
        flip(file, offset)
        seen.add(weights_fingerprint(model))
        flip(file, offset)
    assert len(seen) == 1 + len(range(0, file.stat().st_size, 77_777))


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize(
    ("shard", "place"),
    [
        ("model-1.safetensors", lambda _: 8 + len('{"__metadata__": {"format": "')),  # in the header
        ("model-1.safetensors", lambda start: start + 50),  # the small tensor
        ("model-1.safetensors", lambda start: start + 100),  # the first element of a large one
        ("model-1.safetensors", lambda start: start + 100 + MIB - 1),  # its last
        ("model-2.safetensors", lambda start: start + MIB * 2 // 5 + 9),  # a sample inside
    ],
    ids=["header", "small tensor", "first element", "last element", "inside"],
)
def test_large_models_differ_wherever_they_are_sampled(
    model: Path, shard: str, place: Callable[[int], int]
) -> None:
    """A folder of the same name with one altered element is another model."""
    before = weights_fingerprint(model)
    file = model / shard
    start = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    flip(file, place(start))
    assert weights_fingerprint(model) != before


@pytest.mark.usefixtures("sampled")
def test_what_sampling_misses_is_one_place_between_samples(model: Path) -> None:
    """The limit that the module's first lines admit: of a large model, an edit of a few bytes between two
    samples. An edit of every element, as training makes, cannot be missed."""
    before = weights_fingerprint(model)
    file = model / "model-2.safetensors"
    start = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    flip(file, start + MIB // 10)
    assert weights_fingerprint(model) == before
    data = file.read_bytes()
    file.write_bytes(data[:start] + bytes(byte ^ 1 for byte in data[start:]))
    assert weights_fingerprint(model) != before


@pytest.mark.usefixtures("sampled")
def test_sampling_reads_little(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = identity._read

    def counted(fd: int, offset: int, size: int, file: Path) -> bytes:
        read.append(size)
        return original(fd, offset, size, file)

    monkeypatch.setattr(identity, "_read", counted)
    weights_fingerprint(model)
    assert sum(read) < 64 * 1024


@pytest.mark.usefixtures("sampled")
def test_names_and_sizes_take_part(model: Path) -> None:
    before = weights_fingerprint(model)
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")
    renamed = weights_fingerprint(model)
    with (model / "model-3.safetensors").open("ab") as file:
        file.write(b"x")
    assert len({before, renamed, weights_fingerprint(model)}) == 3


@pytest.mark.usefixtures("sampled")
def test_files_of_other_formats_are_sampled_evenly(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pattern(8 * MIB))
    before = weights_fingerprint(tmp_path)
    assert weights_fingerprint(file) == before, "a single file may be named itself"
    for offset in (0, 8 * MIB * 4 // 9 + 1, 8 * MIB - 1):
        flip(file, offset)
        assert weights_fingerprint(tmp_path) != before
        flip(file, offset)


def test_only_the_files_that_the_load_format_takes_count(model: Path) -> None:
    before = weights_fingerprint(model)
    (model / "pytorch_model.bin").write_bytes(b"older")
    assert weights_fingerprint(model) == weights_fingerprint(model, "safetensors") == before
    assert weights_fingerprint(model, "npcache") != before
    write_safetensors(model / "consolidated.safetensors", {"c": pattern(10)})
    assert weights_fingerprint(model) == weights_fingerprint(model, "mistral") != before


@pytest.mark.parametrize(
    ("prepare", "load_format", "reason"),
    [
        (lambda folder: None, "tensorizer", "load format tensorizer"),
        (lambda folder: [file.unlink() for file in folder.iterdir()], "auto", "no weights"),
        (shutil.rmtree, "auto", "no weights"),
    ],
    ids=["format", "empty", "gone"],
)
def test_unknown_weights_say_what_to_do(
    model: Path, prepare: Callable[[Path], object], load_format: str, reason: str
) -> None:
    prepare(model)
    with pytest.raises(WeightsUnknown, match=f"{reason}.*; set weights_version"):
        weights_fingerprint(model, load_format)


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 60) + bytes(2000),  # a header longer than the file
        struct.pack("<Q", 4) + b"nope" + bytes(2000),
        struct.pack("<Q", 20) + b'{"a":{"dtype":"U8"}}' + bytes(2000),
        struct.pack("<Q", 26) + b'{"a":{"data_offsets":[0]}}' + bytes(2000),
        struct.pack("<Q", 34) + b'{"a":{"data_offsets":[0,9999999]}}' + bytes(2000),
    ],
    ids=["too long", "no JSON", "no offsets", "one offset", "ends early"],
)
def test_a_broken_safetensors_file_is_said(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsUnknown, match=r"model\.safetensors .*; set weights_version"):
        weights_fingerprint(tmp_path)


def test_an_adapter_is_all_its_bytes(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    write_safetensors(adapter / "adapter_model.safetensors", {"a": pattern(MIB)})
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    before = adapter_digest(adapter)
    shutil.copytree(adapter, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("not weights")
    assert adapter_digest(tmp_path / "copy") == before
    flip(adapter / "adapter_model.safetensors", MIB // 2)
    flipped = adapter_digest(adapter)
    (adapter / "adapter_config.json").write_text('{"r": 16}')
    assert len({before, flipped, adapter_digest(adapter)}) == 3
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsUnknown, match="is no LoRA adapter"):
        adapter_digest(adapter)


# --- the manifest ---------------------------------------------------------------------------------------


CONFIG = {
    "_name_or_path": "/models/a",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "5.19.0",
    "use_cache": True,
    "id2label": {0: "LABEL_0"},
}
WHOLE = Whole("cpu-vec", "float32", Shape(Geometry(128, (LaneGroup(30, 3, 65536),)), (0, 30), 1))


def facts(**changes: Any) -> ModelFacts:
    values = {"weights": Path("/models/a"), "load_format": "auto", "ranks": (1, 1), "max_model_len": 4096}
    return ModelFacts(**{**values, "config": CONFIG, "engine": {"dtype": "float32"}, **changes})


def test_the_manifest_is_readable_and_flat() -> None:
    manifest = build_manifest(facts(), "version:1", WHOLE, 256)
    assert manifest.model == {
        "architectures": '["LlamaForCausalLM"]',
        "engine.dtype": "float32",
        "hidden_size": 576,
        "rms_norm_eps": 1e-05,
        "rope_parameters.rope_theta": 100000.0,
        "rope_parameters.rope_type": "default",
        "tie_word_embeddings": True,
    }
    assert (manifest.unit_tokens, manifest.geometry.num_runs, manifest.chunk_tokens) == (128, 90, 256)


@pytest.mark.parametrize(
    "change",
    [
        {"config": {**CONFIG, "_name_or_path": "/models/b"}},
        {"config": {**CONFIG, "transformers_version": "6"}},
        {"weights": Path("/models/b")},
        {"max_model_len": 8192},
    ],
)
def test_what_does_not_change_kv_does_not_change_the_namespace(change: dict[str, Any]) -> None:
    one, other = (build_manifest(made, "version:1", WHOLE, 256) for made in (facts(), facts(**change)))
    assert one.namespace == other.namespace


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"config": {**CONFIG, "hidden_size": 577}}, "hidden_size"),
        ({"config": {**CONFIG, "a_field_of_a_later_model": 1}}, "a_field_of_a_later_model"),
        (
            {"config": {**CONFIG, "rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}},
            "rope_theta",
        ),
        ({"config": {**CONFIG, "sliding_window": 4096}}, "sliding_window"),
        ({"engine": {"dtype": "bfloat16"}}, "engine.dtype"),
        ({"engine": {"dtype": "float32", "quantization": "fp8"}}, "engine.quantization"),
    ],
)
def test_what_may_change_kv_changes_the_namespace_and_is_named(change: dict[str, Any], field: str) -> None:
    one, other = (build_manifest(made, "version:1", WHOLE, 256) for made in (facts(), facts(**change)))
    assert one.namespace != other.namespace
    assert field in "".join(differences(one, other))


def test_rope_that_depends_on_the_longest_request_is_told_apart() -> None:
    rope = {"config": {**CONFIG, "rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 500}}}
    short, long = model_identity(facts(**rope)), model_identity(facts(**rope, max_model_len=131072))
    assert short != long
    assert str(short["rope_parameters.long_factor"]).startswith("sha256:"), (
        "long values are put in as digests"
    )


def test_a_version_of_the_users_stands_for_the_files() -> None:
    nowhere = facts(weights=Path("/does/not/exist"))
    assert weights_identity(nowhere, "2026-11") == "version:2026-11"
    with pytest.raises(WeightsUnknown):
        weights_identity(nowhere)


def test_dummy_weights_depend_on_the_ranks() -> None:
    """vLLM draws them from a fixed seed, shard by shard."""
    dummy = facts(load_format="dummy")
    assert weights_identity(dummy) == "dummy:tp1pp1"
    assert weights_identity(replace(dummy, ranks=(2, 1))) == "dummy:tp2pp1"


# --- what vLLM says -------------------------------------------------------------------------------------


def served(model_path: Path, **changes: Any) -> ModelFacts:
    """The facts of an engine that vLLM itself has configured."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(model_path), dtype="float32", max_model_len=1024, **changes)
    )
    return model_facts(config)


def test_the_facts_are_those_of_vllm(model_path: Path) -> None:
    found = served(model_path)
    assert (found.weights, found.load_format, found.ranks, found.max_model_len) == (
        model_path,
        "auto",
        (1, 1),
        1024,
    )
    model = model_identity(found)
    assert (model["hidden_size"], model["rope_parameters.rope_theta"]) == (576, 100000.0)
    assert (model["engine.dtype"], model["model_type"]) == ("float32", "llama")
    assert not [name for name, value in model.items() if str(model_path) in str(value)], "no path is in it"


def test_overrides_of_the_configuration_take_part(model_path: Path) -> None:
    """Rope is scaled by an option of the engine, not by a file."""
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0}}
    one, other = (
        model_identity(made) for made in (served(model_path), served(model_path, hf_overrides=scaled))
    )
    assert other["rope_parameters.factor"] == 2.0
    assert one != other


def test_a_model_that_was_never_downloaded_says_so() -> None:
    folder = _weights_folder("nobody/nothing", None, None)
    with pytest.raises(WeightsUnknown, match="no weights"):
        weights_fingerprint(folder)
