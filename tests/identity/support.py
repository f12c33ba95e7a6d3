"""An engine whose KV depends on the files that it has loaded: real folders, vLLM's real scheduler, a fake model.

The KV of the fake model in `tests.connector.support` is a digest of the prompt. Here the bytes of the weights, the
dtype and the adapter's bytes, as they were when the engine loaded them, go into it as well. So an engine that is
given the KV of other weights fails at the first token that attends to it.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.config import ModelConfig, VllmConfig

from tests.connector.support import BLOCK, CHUNK, HANDSHAKE, Engine, Node, kv_of
from tests.connector.support import prompt as prompt_of
from tests.connector.test_identity import write_safetensors

TEXT = prompt_of(1, 3 * CHUNK + 2 * BLOCK + 5)
STORED_TOKENS = 3 * CHUNK + 2 * BLOCK
TENSORS = {"model.embed.weight": bytes(range(256)) * 16, "model.layers.0.weight": bytes(8192)}


def model_folder(parent: Path, like: Path) -> Path:
    """A folder named "model", with the configuration of a real model and small weights."""
    folder = parent / "model"
    folder.mkdir(parents=True)
    for file in like.glob("*.json"):
        shutil.copy(file, folder)
    write_safetensors(folder / "model.safetensors", TENSORS)
    return folder


def alter_a_tensor(folder: Path) -> None:
    """Flips one bit in the middle of the last tensor. Sizes, names and times stay as they are."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4096] ^= 1
    file.write_bytes(data)


def adapter_folder(folder: Path, weights: bytes) -> Path:
    """A LoRA adapter at this place; replaces what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@cache
def configured(folder: Path, dtype: str) -> ModelConfig:
    """vLLM's view of a folder; the configuration in it does not change."""
    return ModelConfig(model=str(folder), dtype=dtype, seed=0, max_model_len=4096)


class LoadedEngine(Engine):
    """An engine that serves the model in `folder` as it was when the engine was made. `early`: see `shake_hands`."""

    def __init__(
        self, node: Node, folder: Path, dtype: str = "float32", *, early: bool = False, **more: Any
    ) -> None:
        self.loaded = hashlib.sha256((folder / "model.safetensors").read_bytes()).digest() + dtype.encode()
        self.adapters: dict[int, bytes] = {}
        self._model = configured(folder, dtype)
        super().__init__(node, shake_hands=False, **{"weights_version": "", **more})
        self._handshake = replace(HANDSHAKE, kv_dtype=dtype)
        if not early:
            self.shake_hands()

    def shake_hands(self) -> None:
        """The worker describes its KV cache: until then the engine has no namespace."""
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._handshake})

    def _config(self, *arguments: Any) -> VllmConfig:
        config = super()._config(*arguments)
        config.model_config = self._model
        return config

    def submit(self, name: str, prompt: Sequence[int], **more: Any) -> Any:
        lora = more.get("lora_request")
        if lora is not None and (lora.load_inplace or lora.lora_int_id not in self.adapters):
            self.adapters[lora.lora_int_id] = (
                Path(lora.lora_path) / "adapter_model.safetensors"
            ).read_bytes()
        return super().submit(name, prompt, **more)

    def _compute(self, name: str, num_tokens: int) -> list[int]:
        with patch("tests.connector.support.kv_of", self._kv_of):
            return super()._compute(name, num_tokens)

    def _kv_of(self, request: Any, tokens: Sequence[int]) -> list[bytes]:
        adapter = self.adapters[request.lora_request.lora_int_id] if request.lora_request else b""
        loaded = hashlib.sha256(self.loaded + b"|" + adapter).digest()
        return [hashlib.sha256(loaded + value).digest() for value in kv_of(request, tokens)]

    @property
    def pulled(self) -> int:
        """Tokens that came from the store."""
        return self.half.shared.stats.pulled_tokens

    def forget(self) -> None:
        """Empties the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()
