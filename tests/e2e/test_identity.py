"""Real engines share KV with their like and with nobody else; tests/identity has many more cases. See `make soak`."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deploy.demo.engine import Engine
from deploy.demo.node import Node
from tests.e2e.support import ask, prompt_text, stored
from tests.support import free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALTERED = "model.layers.0.self_attn.v_proj.weight"
CHUNK_TOKENS, OBJECTS, GENERATED_TOKENS = 512, 2, 16


def altered_copy(folder: Path, parent: Path) -> Path:
    """The model in a folder of the same name, with one tensor negated."""
    copy = shutil.copytree(folder, parent / folder.name)
    file = copy / "model.safetensors"
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        start, stop = json.loads(data.read(length))[ALTERED]["data_offsets"]
    tensor = np.memmap(file, np.float32, "r+", 8 + length + start, ((stop - start) // 4,))
    np.negative(tensor, out=tensor)
    tensor.flush()
    return copy


@contextlib.contextmanager
def serving(name: str, model: Path, node: Node, logs: Path, *flags: str) -> Iterator[Engine]:
    engine = Engine(name, model, free_port(), logs, store=node.transfer_config, flags=flags)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


def wait_for_objects(node: Node, count: int) -> None:
    wait_until(lambda: stored(node) == count, 30, f"{count} objects to be stored")


def test_real_engines_share_with_their_like_only(model_path: Path, repository: Path, tmp_path: Path) -> None:
    prompt = prompt_text(repository, "tides")
    altered = altered_copy(model_path, tmp_path)
    node = Node(free_port(), free_port(), tmp_path)
    kinds: list[tuple[str, Path, list[str]]] = [
        ("original", model_path, []),
        ("altered", altered, []),
        ("bfloat16", model_path, ["--dtype", "bfloat16"]),
    ]
    with contextlib.ExitStack() as exits:
        exits.callback(node.stop)
        node.wait_ready()
        for name, model, flags in kinds:
            before = stored(node)
            with serving(name, model, node, tmp_path, *flags) as engine:
                first = ask(engine, prompt, GENERATED_TOKENS)
                assert (first.promised, first.answer.pulled) == (0, 0), f"{name} was given the KV of others"
                wait_for_objects(node, before + OBJECTS)
                engine.forget_local_prefixes()
                again = ask(engine, prompt, GENERATED_TOKENS)
                print(f"{name}: {first}; then {again}")
                assert again.answer.pulled == CHUNK_TOKENS
                if name != "bfloat16":  # where two cold runs may differ
                    assert again.answer.text == first.answer.text
        with serving("reset", model_path, node, tmp_path) as engine:
            assert ask(engine, prompt, GENERATED_TOKENS).answer.pulled == CHUNK_TOKENS, (
                "of the first engine's"
            )
            engine.forget_local_prefixes(external=True)
            assert ask(engine, prompt, GENERATED_TOKENS).promised == 0
            engine.forget_local_prefixes()
            assert ask(engine, prompt, GENERATED_TOKENS).answer.pulled == CHUNK_TOKENS, "its own"
