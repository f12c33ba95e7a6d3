"""One engine with a tiny model, and the checks that it must pass.

Compared are tokens and their logprobs with those of a cold run of the same engine (`skip_reading_prefix_cache`), and
with a hit of its own prefix cache.
"""

import json
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from deploy.demo.metrics import total
from kvstore.core import Namespace
from tests.hybrid.flipping import drop, flip, objects_by_kind, promote
from tests.hybrid.models import MODELS, VOCABULARY
from tests.support import wait_until

BLOCK, CHUNK, RETENTION = 128, 256, 512
LENGTH = 1_500  # of a prompt: a tail of one block, a window and a chunk of local attention that end inside
TOKENS = 16
EXACT = 1e-3  # of a logprob: other orders of additions are that near; zeros in a kind are not
SETTLED_S, QUIET_S, FOUND_S = 60.0, 1.5, 30.0


class Said(NamedTuple):
    """An answer."""

    tokens: list[int]
    logprobs: list[float]
    cached: int

    def far(self, other: "Said") -> float:
        """The largest difference of logprobs; infinite where tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        return max(abs(one - two) for one, two in zip(self.logprobs, other.logprobs, strict=True))


class Node(NamedTuple):
    """What is known of the node: it belongs to another process."""

    control: str
    admin: str
    pid: int

    def gauge(self, name: str, **labels: str) -> float:
        return total(httpx.get(f"{self.admin}/metrics", timeout=5).text, name, labels)

    def objects(self) -> list[dict[str, Any]]:
        page = httpx.get(f"{self.admin}/v1/objects", params={"limit": 500}, timeout=5).json()
        found: list[dict[str, Any]] = page["objects"]
        return found

    def settle(self) -> None:
        """Returns when nothing is being pushed any more."""
        seen, since = -1.0, time.monotonic()

        def settled() -> bool:
            nonlocal seen, since
            now = self.gauge("kvstore_objects", tier="dram")
            if now != seen or self.gauge("kvstore_reservations"):
                seen, since = now, time.monotonic()
            return time.monotonic() - since > QUIET_S

        wait_until(settled, SETTLED_S, "pushes to come to an end")


UNRELATED = [5, 6, 7]


class Player:
    """The engine, and the checks that failed.

    Attributes:
        computed: the answer to the first prompt where nothing is pulled, if that is another than where it is.
    """

    def __init__(self, name: str, folder: Path, node: Node, orders: Path, tp: int = 1) -> None:
        self.name, self.node, self.orders = name, node, orders
        self.tiny = MODELS[name]
        self.bad = 0
        self.tp = tp
        self.computed: Said | None = None
        orders.write_text("")
        began = time.monotonic()
        self.llm = LLM(**self._arguments(folder))
        print(f"  {name}: engine up after {time.monotonic() - began:.0f} s", flush=True)
        draw = random.Random(7)
        self.start = [draw.randrange(3, VOCABULARY) for _ in range(LENGTH - 60)]
        self.first = [*self.start, *(draw.randrange(3, VOCABULARY) for _ in range(60))]
        self.longer = [*self.first, *(draw.randrange(3, VOCABULARY) for _ in range(300))]
        self.sharing = [*self.start[:700], *(draw.randrange(3, VOCABULARY) for _ in range(300))]

    def _arguments(self, folder: Path) -> dict[str, Any]:
        extra = {
            "node": self.node.control,
            "chunk_tokens": CHUNK,
            "retention_tokens": RETENTION,
            "load_policy": "always",
            "transfer": "mooncake",  # a node that is killed takes its memory with it
            "lookup_timeout_s": 10.0,
            "request_timeout_s": 5.0,
            "load_timeout_s": 10.0,
        }
        connector = KVTransferConfig(
            kv_connector="Saboteur",
            kv_connector_module_path="tests.hybrid.saboteur",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
        return {
            "model": str(folder),
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 64 << 20,
            "enforce_eager": True,
            "dtype": "float32",
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "kv_transfer_config": connector,
            "tensor_parallel_size": self.tp,
            "disable_log_stats": True,
        } | self.tiny.flags

    # --- what the engine does -------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[list[int]], *, cold: bool = False, tokens: int = TOKENS
    ) -> list[Said]:
        """Answers to prompts that come at the same time."""
        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            skip_reading_prefix_cache=cold or None,
        )
        outputs = self.llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        return [
            Said(
                list(one.outputs[0].token_ids),
                [
                    table[token].logprob
                    for token, table in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
                ],
                one.num_cached_tokens or 0,
            )
            for one in outputs
        ]

    def forget(self) -> None:
        """Empties the engine's own prefix cache. While a save holds blocks vLLM refuses, and they go in a step."""

        def forgotten() -> bool:
            if self.llm.reset_prefix_cache():
                return True
            self.generate([UNRELATED])
            return False

        wait_until(forgotten, SETTLED_S, "the engine to forget its own prefixes")

    def one(self, prompt: list[int], *, cold: bool = False, local: bool = False) -> Said:
        """One answer; the engine forgets its own prefixes before, unless `local`."""
        if not local:
            self.forget()
        [said] = self.generate([prompt], cold=cold)
        return said

    def order(self, *words: object) -> None:
        """Tells the saboteur."""
        self.orders.write_text(" ".join(map(str, words)))

    def check(self, what: str, holds: bool, seen: object) -> None:
        """Notes whether something holds."""
        self.bad += not holds
        print(f"  {self.name}: {'ok ' if holds else 'BAD'} {what}: {seen}", flush=True)

    def check_same(self, what: str, said: Said, expected: Said, cached: int) -> None:
        """The same tokens, logprobs within rounding, and so many tokens that were not computed."""
        far = said.far(expected)
        self.check(
            what,
            far < EXACT and said.cached == cached,
            f"{said.cached} tokens hit, logprobs within {far:.0e}",
        )

    # --- what must hold -------------------------------------------------------------------------------

    @property
    def tail(self) -> int:
        """Where a hit of the first prompt ends."""
        return (LENGTH - 1) // BLOCK * BLOCK

    def write(self, keep: Path) -> Said:
        """Everything that one process can show."""
        cold = self.one(self.first, cold=True)
        local = self.one(self.first, local=True)
        self.check("a hit of its own is like a cold run", local.far(cold) < EXACT, f"{local.cached} tokens")
        self.node.settle()
        kinds = len(objects_by_kind(self.node.control, self.node.objects()))
        self.check("objects of every kind are stored", kinds == self.tiny.kinds, f"{kinds} kinds")
        self.check_same("pulled like a local hit", self.one(self.first), local, self.tail)
        keep.write_text(json.dumps(local))
        return local

    def read(self, keep: Path) -> Said:
        """The answer of the process that has written."""
        return Said(*json.loads(keep.read_text()))

    def warm(self, kind: int) -> None:
        """The objects of one kind are brought into the memory of a node that has all of them on NVMe."""
        self.generate([UNRELATED])  # with its first step an engine opens its namespace
        views = self.node.objects()
        namespace = Namespace(bytes.fromhex(str(views[0]["namespace"])))
        keys = objects_by_kind(self.node.control, views)[kind]
        promote(self.node.control, namespace, keys)
        wait_until(lambda: len(self.in_memory()) == len(keys), SETTLED_S, "the node to bring its objects")
        warmed = self.in_memory() == {bytes(key).hex() for key in keys}
        self.check(f"kind {kind} alone is in memory", warmed, f"{len(keys)} of {len(views)} objects")

    def in_memory(self) -> set[str]:
        """The keys of objects with a copy in DRAM."""
        return {str(view["key"]) for view in self.node.objects() if "dram" in view["tiers"]}

    def share(self, expected: Said) -> None:
        """Prompts that have something in common."""
        # A state at the last whole chunk is there because vLLM is told to keep one in 256 tokens.
        longer, sharing = self.one(self.longer), self.one(self.sharing)
        self.node.settle()
        self.check_same("extended", longer, self.one(self.longer, cold=True), LENGTH // CHUNK * CHUNK)
        self.check_same(
            "prefix shared", sharing, self.one(self.sharing, cold=True), 700 // RETENTION * RETENTION
        )
        self.node.settle()
        self.forget()
        batch = [self.first, self.longer, self.sharing, self.first]
        answers = [expected, longer, sharing, expected]
        for number, said in enumerate(self.generate(batch)):
            far = said.far(answers[number])
            self.check(
                f"batch, prompt {number}",
                far < EXACT and said.cached >= CHUNK,
                f"{said.cached} tokens hit, {far:.0e}",
            )
        self.forget()
        self.one(self.first[:800], cold=True)
        self.check_same("local and pulled", self.one(self.first, local=True), expected, self.tail)

    def zero(self, expected: Said) -> None:
        """Every kind matters."""
        for kind in range(self.tiny.kinds):
            self.order("zero", kind)
            said = self.one(self.first)
            self.order()
            far = said.far(expected)
            self.check(
                f"zeros in kind {kind} show",
                far > EXACT and said.cached == self.tail,
                f"logprobs within {far:.0e}",
            )

    def flip(self, expected: Said) -> None:
        """Damage of any kind is seen."""
        computed = self.computed or expected
        views = self.node.objects()
        namespace = Namespace(bytes.fromhex(str(views[0]["namespace"])))
        by_kind = objects_by_kind(self.node.control, views)
        for kind in range(self.tiny.kinds):
            before = self.node.gauge("kvstore_checksum_failures_total")
            flip(self.node.control, self.node.pid, namespace, by_kind[kind])
            said = self.one(self.first)
            found = wait_until(partial(self.bad_copies_since, before), FOUND_S, "the node to find a bad copy")
            far = said.far(computed)
            self.check(
                f"a flipped bit in kind {kind} is found",
                far < EXACT and said.cached < self.tail,
                f"{found:.0f} bad copies, {said.cached} tokens hit",
            )
            drop(self.node.control, namespace, by_kind[kind])  # what else was flipped, too
            for _ in range(8):
                self.node.settle()
                if self.one(self.first).cached == self.tail:
                    break
            else:
                self.check(f"kind {kind} is pushed again", False, "it is not")
            self.node.settle()

    def bad_copies_since(self, before: float) -> float:
        """How many copies the node has found to be bad since."""
        return self.node.gauge("kvstore_checksum_failures_total") - before

    def kill(self, expected: Said) -> None:
        """The node dies when a load begins."""
        computed = self.computed or expected
        self.order("kill", self.node.pid)
        said = self.one(self.first)
        dead = self.orders.read_text() == ""
        self.check(
            "killed during a load",
            dead and said.far(computed) < EXACT and not said.cached,
            f"{said.cached} tokens hit",
        )
        self.check("and computed from then on", self.one(self.first).far(computed) < EXACT, "the same tokens")
