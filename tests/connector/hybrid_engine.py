"""A vLLM scheduler for models of several kinds of KV, with a fake model whose every read is checked.

Each kind's KV of a token is a digest of the prompt up to it and of the group, so that blocks of another group show.
In each step the model reads what its layers would: all tokens, those in the window, those in the chunk of local
attention, or the one state; what it reads must be what a model would have computed.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.kinds import Kind, Reach, kinds_of
from connector.metadata import Handshake, Layer, LoadJob, LoadReport
from tests.connector.support import BLOCK, Engine, Node, Worker, kv_of
from tests.connector.test_boundaries import chunked, full, groups_of, state, window

HAND = Handshake("test", "float32", BLOCK, (Layer("layers.0", 1, 16), Layer("layers.1", 1, 16)))
STATE_HAND = Handshake("state", "opaque", 1, (Layer("layers.2", 1, 16), Layer("layers.3", 1, 16)))

GEMMA = (window(BLOCK, 40), window(BLOCK, 40), full(BLOCK))
LLAMA4 = (chunked(BLOCK, 96), full(BLOCK))
QWEN = (state(BLOCK), state(BLOCK), full(BLOCK))
EVERYTHING = (window(BLOCK, 100), full(BLOCK), state(BLOCK), chunked(BLOCK, 48), window(BLOCK, 20))
MODELS = {"gemma": GEMMA, "llama4": LLAMA4, "qwen": QWEN, "everything": EVERYTHING}


class HybridWorker(Worker):
    """Reports failures as the worker half does for a load that is of no use in part."""

    def _load(self, job: LoadJob, output: KVConnectorOutput) -> LoadReport:
        invalid = set(output.invalid_block_ids)
        report = super()._load(job, output)
        assert job.all_or_nothing
        output.invalid_block_ids = invalid
        if report.valid < len(job.objects) or not job.objects:
            output.failed_recving.add(job.request)
        return report


class HybridEngine(Engine):
    """One engine. `specs` are its groups; `interval` is vLLM's own retention of states and windows."""

    def __init__(self, node: Node, specs: Sequence[Any] = GEMMA, *, interval: int = 0, **more: Any) -> None:
        self.specs, self._interval = specs, interval
        self.kinds: tuple[Kind, ...] = kinds_of(groups_of(specs))
        super().__init__(node, shake_hands=False, **more)
        self.worker = HybridWorker(node, self.kv_cache_config.num_blocks)
        others = tuple(STATE_HAND if kind.reach is Reach.STATE else HAND for kind in self.kinds[1:])
        hand = Handshake(HAND.tile_format, HAND.kv_dtype, BLOCK, HAND.layers, kinds=others)
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): hand})
        assert self.half.session.unsupported is None, self.half.session.unsupported

    def _config(self, *arguments: Any) -> Any:
        config = super()._config(*arguments)
        if any(kind.reach is Reach.STATE for kind in self.kinds):
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.mamba_block_size = BLOCK
        return config

    def _kv_cache_config(self, num_blocks: int) -> KVCacheConfig:
        groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(self.specs)]
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self._interval,
            hash_block_size=BLOCK,
            cache_hit_alignment_tokens=BLOCK,
        )

    def _compute(self, name: str, num_tokens: int) -> list[int]:
        request = self.scheduler.requests[name]
        tokens = self.model_tokens[name]
        start = request.num_computed_tokens - num_tokens
        stop = start + num_tokens
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        expected = kv_of(request, tokens)
        for kind in self.kinds:
            for group in kind.groups:
                self._read(name, kind, group, tables[group], expected, start)
                self._write(kind, group, tables[group], expected, start, stop)
        if stop < request.num_prompt_tokens or stop < request.num_tokens:
            return []
        if stop == len(tokens):
            tokens.append(int.from_bytes(expected[stop - 1][:2], "big") % 1000 + 1)
        return [tokens[stop]]

    def _read(self, name: str, kind: Kind, group: int, table: Any, expected: Any, start: int) -> None:
        first = {
            Reach.FULL: 0,
            Reach.WINDOW: max(0, start - kind.tokens + 1),
            Reach.CHUNKED: start // max(1, kind.tokens) * kind.tokens,
            Reach.STATE: max(0, start - 1),
        }[kind.reach]
        for position in range(first, start):
            block, at = table[position // BLOCK], position % BLOCK
            assert block, f"{name}: {kind.name} of group {group} has no block for token {position} of {start}"
            held = self.worker.memory[block][0 if kind.reach is Reach.STATE else at]
            wanted = _of_group(expected[position], group)
            assert held == wanted, (
                f"{name}: wrong {kind.name} of group {group} at token {position} of {start}"
            )

    def _write(self, kind: Kind, group: int, table: Any, expected: Any, start: int, stop: int) -> None:
        for position in range(start, stop) if kind.reach is not Reach.STATE else (stop - 1,):
            block, at = table[position // BLOCK], position % BLOCK
            assert block, f"{kind.name} of group {group} cannot write token {position}"
            self.worker.memory[block][0 if kind.reach is Reach.STATE else at] = _of_group(
                expected[position], group
            )


def _of_group(value: bytes, group: int) -> bytes:
    return hashlib.sha256(value + bytes([group])).digest()
