"""Keys of requests: the same KV, the same key, whatever engine computes it; other KV, another key."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from connector.keys import AdapterDigests, Link, links_of
from kvstore.core import Key, Namespace, chunk_key
from tests.connector.support import feature

NAMESPACE = Namespace(b"n" * 32)
CHUNK = 64
TOKENS = list(range(1, 200))


def request(tokens: Any = TOKENS, **more: Any) -> Any:
    values: dict[str, Any] = {
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
        "lora_request": None,
    }
    return SimpleNamespace(all_token_ids=tokens, num_prompt_tokens=len(tokens), **{**values, **more})


def links(tokens: Any = TOKENS, block: int = 16, adapter: str = "", **more: Any) -> tuple[Link, ...]:
    return links_of(request(tokens, **more), NAMESPACE, CHUNK, block, adapter)


def keys(*args: Any, **more: Any) -> list[Key]:
    return [link.key for link in links(*args, **more)]


def test_chunks_then_a_tail_of_whole_blocks() -> None:
    made = links()
    assert [(link.start, link.stop, link.tail, link.depth) for link in made] == [
        (0, 64, False, 0),
        (64, 128, False, 1),
        (128, 192, False, 2),
    ]
    made = links(TOKENS[:180])
    assert [(link.start, link.stop, link.tail) for link in made] == [
        (0, 64, False),
        (64, 128, False),
        (128, 176, True),
    ]


def test_links_are_a_chain_from_the_namespace() -> None:
    made = links()
    assert bytes(made[0].parent) == bytes(NAMESPACE)
    assert [link.parent for link in made[1:]] == [link.key for link in made[:-1]]
    assert made[0].key == chunk_key(Key(NAMESPACE), TOKENS[:64])


@pytest.mark.parametrize("length", [0, 1, 15, 16, 63, 64, 65, 80])
def test_what_is_less_than_a_block_is_nobody_s(length) -> None:
    made = links(TOKENS[:length])
    assert sum(link.stop - link.start for link in made) == length - length % 16
    assert sum(link.tail for link in made) <= 1


def test_generated_tokens_are_not_part_of_it() -> None:
    generating = request()
    generating.all_token_ids = [*TOKENS, 7, 8, 9]
    assert links_of(generating, NAMESPACE, CHUNK, 16) == links()


def test_chunks_do_not_depend_on_the_block_size() -> None:
    assert keys(block=16)[:3] == keys(block=32)[:3] == keys(block=64)[:3]


def test_tokens_may_be_numpy_integers() -> None:
    assert keys([np.int64(token) for token in TOKENS]) == keys(np.array(TOKENS).tolist())


@pytest.mark.parametrize("at", [0, 63, 64, 190])
def test_a_token_changes_its_link_and_all_after_it(at) -> None:
    changed = list(TOKENS)
    changed[at] += 1
    same = at // CHUNK
    assert keys(changed)[:same] == keys()[:same]
    assert not set(keys(changed)[same:]) & set(keys())


def test_a_salt_changes_everything() -> None:
    assert not set(keys(cache_salt="a")) & set(keys())
    assert not set(keys(cache_salt="a")) & set(keys(cache_salt="b"))


def test_an_adapter_changes_everything() -> None:
    assert not set(keys(adapter="a")) & set(keys())
    assert not set(keys(adapter="a")) & set(keys(adapter="b")) & set(keys(cache_salt="a"))


def test_an_image_changes_the_links_that_it_touches_and_those_after() -> None:
    plain = keys()
    assert keys(mm_features=[feature("cat", 70, 20)])[0] == plain[0]
    assert not set(keys(mm_features=[feature("cat", 70, 20)])[1:]) & set(plain)
    assert keys(mm_features=[feature("cat", 70, 20)]) != keys(mm_features=[feature("dog", 70, 20)])
    assert keys(mm_features=[feature("cat", 70, 20)]) != keys(mm_features=[feature("cat", 71, 20)])
    assert keys(mm_features=[feature("cat", 64, 64)])[0] == plain[0]  # ends and begins at the edges


def test_an_image_over_two_chunks_is_in_the_keys_of_both() -> None:
    """The same tokens behind another part of an image: mutant, the item counted only where it begins."""
    first, second = (
        keys(mm_features=[feature("cat", 60, 20)])[:2],
        keys(mm_features=[feature("dog", 60, 20)])[:2],
    )
    assert first[0] != second[0] and first[1] != second[1]
    made = links(mm_features=[feature("cat", 60, 20)])
    assert made[1].key == chunk_key(made[0].key, TOKENS[64:128], [("mm", "cat", -4)])


def test_the_order_of_images_in_the_request_does_not_matter() -> None:
    cat, dog = feature("cat", 10, 5), feature("dog", 30, 5)
    assert keys(mm_features=[cat, dog]) == keys(mm_features=[dog, cat])


def test_embeddings_are_told_apart_by_their_bytes() -> None:
    zeros, ones = torch.zeros(199, 4), torch.ones(199, 4)
    late = zeros.clone()
    late[100] = 1
    blank = [0] * 199
    assert keys(blank, prompt_embeds=zeros) != keys(blank)
    assert keys(blank, prompt_embeds=zeros) != keys(blank, prompt_embeds=ones)
    assert keys(blank, prompt_embeds=late)[0] == keys(blank, prompt_embeds=zeros)[0]
    assert keys(blank, prompt_embeds=late)[1] != keys(blank, prompt_embeds=zeros)[1]


# --- adapters -----------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def lora(path, number: int = 1, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=str(path), load_inplace=load_inplace)


def change(adapter) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(1, 1))


def test_an_adapter_is_named_by_its_bytes_not_by_its_path(adapter, tmp_path_factory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for file in adapter.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    digests = AdapterDigests()
    assert digests.digest(lora(adapter)) == digests.digest(lora(copy, 2)) is not None
    change(copy)
    assert AdapterDigests().digest(lora(copy, 3)) != digests.digest(lora(adapter))


def test_an_adapter_that_changes_under_the_engine_has_no_digest(adapter) -> None:
    """What the engine has loaded may be the old or the new one."""
    digests = AdapterDigests()
    first = digests.digest(lora(adapter))
    change(adapter)
    assert digests.digest(lora(adapter)) is None
    second = digests.digest(lora(adapter, load_inplace=True))
    assert second not in (None, first)
    assert digests.digest(lora(adapter)) == second


def test_what_is_no_adapter_on_this_machine_has_no_digest(tmp_path) -> None:
    assert AdapterDigests().digest(lora(tmp_path / "nowhere")) is None
    assert AdapterDigests().digest(lora(tmp_path)) is None
