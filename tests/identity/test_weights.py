"""Engines share KV if and only if it is the same: other weights under the same name, other dtypes, other adapters.

Mutants that were tried and are caught: the fingerprint replaced by the folder's name; the dtype left out of the
manifest (as the model's and the KV's); the adapter's digest replaced by its path. A store that always misses fails
wherever `STORED_TOKENS` is expected.
"""

import shutil
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from kvstore.core import MissReason
from tests.connector.support import Node
from tests.identity.support import (
    STORED_TOKENS,
    TEXT,
    LoadedEngine,
    adapter_folder,
    alter_a_tensor,
    model_folder,
)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def folder(tmp_path: Path, model_path: Path) -> Path:
    return model_folder(tmp_path / "one", model_path)


def test_the_same_weights_elsewhere_share_everything(node: Node, folder: Path, tmp_path: Path) -> None:
    first = LoadedEngine(node, folder).generate("a", TEXT)
    copy = shutil.copytree(folder, tmp_path / "a copy" / "of another name")
    other = LoadedEngine(node, copy)
    assert other.generate("b", TEXT) == first
    assert other.pulled == STORED_TOKENS


def test_one_altered_tensor_in_a_folder_of_the_same_name_shares_nothing(
    node: Node, folder: Path, tmp_path: Path
) -> None:
    altered = shutil.copytree(folder, tmp_path / "two" / folder.name)
    alter_a_tensor(altered)
    one, two = LoadedEngine(node, folder), LoadedEngine(node, altered)
    answers = [engine.generate(f"{engine.pulled}", TEXT) for engine in (one, two)]
    assert answers[0] != answers[1]
    assert (one.pulled, two.pulled) == (0, 0)
    assert len({manifest.namespace for e in (one, two) for manifest in e.control.manifests}) == 2
    for engine, answer in zip((one, two), answers, strict=True):  # each of the two finds its own again
        engine.forget()
        assert engine.generate("again", TEXT) == answer
        assert engine.pulled == STORED_TOKENS
        engine.assert_nothing_left()


def test_weights_replaced_under_the_same_path_share_nothing_with_the_older(node: Node, folder: Path) -> None:
    old = LoadedEngine(node, folder)
    old.generate("a", TEXT)
    alter_a_tensor(folder)
    new = LoadedEngine(node, folder)
    new.generate("b", TEXT)
    assert new.pulled == 0
    old.forget()
    old.generate("c", TEXT)
    assert old.pulled == STORED_TOKENS


def test_another_dtype_shares_nothing_and_does_not_loop(node: Node, folder: Path) -> None:
    """Seen elsewhere: a reader of another dtype that asked, failed to load and asked again, for ever."""
    exact = LoadedEngine(node, folder)
    exact.generate("a", TEXT)
    node.calls.clear()
    rough = LoadedEngine(node, folder, dtype="bfloat16")
    rough.generate("b", TEXT)
    assert rough.pulled == 0
    assert node.calls.count("acquire") <= 1
    assert not rough.worker.seen_loads
    rough.forget()
    rough.generate("c", TEXT)
    assert rough.pulled == STORED_TOKENS, "what is of its own dtype is shared"
    rough.assert_nothing_left()


def test_an_adapter_replaced_under_the_same_path_shares_nothing(
    node: Node, folder: Path, tmp_path: Path
) -> None:
    place = adapter_folder(tmp_path / "adapter", b"the first")
    first = LoadedEngine(node, folder).generate("a", TEXT, lora_request=LoRARequest("tuned", 1, str(place)))
    adapter_folder(place, b"another 1")
    engine = LoadedEngine(node, folder)
    second = engine.generate("b", TEXT, lora_request=LoRARequest("tuned", 1, str(place)))
    assert second != first
    assert engine.pulled == 0
    adapter_folder(place, b"the first")
    engine = LoadedEngine(node, folder)
    assert engine.generate("c", TEXT, lora_request=LoRARequest("tuned", 1, str(place))) == first
    assert engine.pulled == STORED_TOKENS


def test_an_adapter_replaced_under_a_running_engine_is_left_alone(
    node: Node, folder: Path, tmp_path: Path
) -> None:
    """The engine goes on with what it has loaded; the files say nothing about that any more."""
    place = adapter_folder(tmp_path / "adapter", b"the first")
    request = LoRARequest("tuned", 1, str(place))
    engine = LoadedEngine(node, folder)
    first = engine.generate("a", TEXT, lora_request=request)
    objects = set(node.objects)
    engine.forget()
    assert engine.generate("found", TEXT, lora_request=request) == first
    assert engine.pulled == STORED_TOKENS
    adapter_folder(place, b"another 1")
    engine.forget()
    assert engine.generate("b", TEXT, lora_request=request) == first
    assert engine.pulled == STORED_TOKENS, "no more than before"
    assert set(node.objects) == objects, "saved under a name that may not be its own"
    assert engine.half.shared.stats.misses[MissReason.LAYOUT_UNSUPPORTED] == 1
    other = LoadedEngine(node, folder)
    assert other.generate("c", TEXT, lora_request=request) != first
    assert other.pulled == 0


def test_an_adapter_that_is_loaded_anew_in_place_is_another_one(
    node: Node, folder: Path, tmp_path: Path
) -> None:
    place = adapter_folder(tmp_path / "adapter", b"the first")
    engine = LoadedEngine(node, folder)
    first = engine.generate("a", TEXT, lora_request=LoRARequest("tuned", 1, str(place)))
    adapter_folder(place, b"another 1")
    engine.forget()
    anew = LoRARequest("tuned", 1, str(place), load_inplace=True)
    second = engine.generate("b", TEXT, lora_request=anew)
    assert second != first
    assert engine.pulled == 0
    engine.forget()
    assert engine.generate("c", TEXT, lora_request=LoRARequest("tuned", 1, str(place))) == second
    assert engine.pulled == STORED_TOKENS
