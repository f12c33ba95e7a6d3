"""Real vLLM CPU engines of different parallelism that feed each other through a real node: `make test-matrix`.

    python -m tests.matrix.run [--only smollm2,pp1-tp2,...] [--logs FOLDER]

For every pair, one engine computes a prompt and ends, then an engine of another TP or PP pulls it. Shown is for each:

* pulled: all of the prompt but at most one engine block comes from the store;
* the same greedy tokens as the reader computes itself, in fp32, after a cold prefill of the same prompt;
* the same KV: what the reader wrote for its own cold prefill is, lane by lane, what the writer wrote, up to rounding
  (a swapped head or a shifted layer is not rounding).

Engines run one after the other. PP wants compiled models, which takes minutes the first time.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.demo.engine import Answer, DemoFailed, Engine
from deploy.demo.node import Node
from deploy.demo.ports import free_port
from kvstore.client import KVStore
from kvstore.core import Key, MissReason, Namespace
from tests.conftest import MODEL
from tests.matrix.make_model import make_model
from tests.support import wait_until

BLOCK_TOKENS = 128  # vLLM's block size on CPU
GENERATED_TOKENS = 24
COMPILE_S = 900.0  # more than engines usually get to start
PUSH_S = 120.0
TOLERANCE = 1e-3  # of the largest value in a lane

PROMPT = (Path(__file__).parents[2] / "deploy" / "demo" / "prompts" / "tides.txt").read_text()
RANDOM = Path(".cache/models/random-llama-4")


class Split(NamedTuple):
    """An engine's parallelism."""

    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return f"TP{self.tp}" if self.pp == 1 else f"PP{self.pp}"


class Pair(NamedTuple):
    """Who feeds whom."""

    model: str
    writer: Split
    reader: Split

    @property
    def name(self) -> str:
        return f"{self.model} {self.writer}->{self.reader}"


PAIRS = [
    Pair("smollm2", Split(), Split(tp=3)),
    Pair("smollm2", Split(tp=3), Split()),
    Pair("random", Split(), Split(tp=2)),
    Pair("random", Split(tp=2), Split()),
    Pair("random", Split(), Split(pp=2)),
    Pair("random", Split(pp=2), Split()),
    Pair("random", Split(tp=2), Split(pp=2)),
]


@dataclass(frozen=True)
class Outcome:
    """What was seen of one pair."""

    pair: Pair
    pulled: Answer
    computed: Answer
    objects: int
    worst: float
    reasons: str

    @property
    def faults(self) -> list[str]:
        """What is not as it must be."""
        missing = self.pulled.prompt_tokens - self.pulled.pulled
        found = []
        if not 0 < missing <= BLOCK_TOKENS:
            found.append(f"{missing} tokens were not pulled ({self.reasons})")
        if self.computed.pulled:
            found.append("the baseline was pulled, too")
        if self.pulled.text != self.computed.text:
            found.append(f"other tokens: {self.pulled.text!r}, not {self.computed.text!r}")
        if self.worst > TOLERANCE:
            found.append(f"KV differs by {self.worst:.1e}")
        return found

    def __str__(self) -> str:
        pulled, verdict = self.pulled, "; ".join(self.faults) or "ok"
        return (
            f"{self.pair.name:22} {pulled.prompt_tokens:5} tokens, {pulled.pulled:5} pulled, "
            f"{self.objects} objects, KV within {self.worst:.0e}: {verdict}"
        )


class Stage:
    """A node, and the engines that come and go."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._number = 0

    @contextlib.contextmanager
    def node(self) -> Iterator[Node]:
        """A node with nothing in it."""
        self._number += 1
        node = Node(free_port(), free_port(), self._logs, name=f"kvstore-{self._number}")
        try:
            node.wait_ready()
            yield node
        finally:
            node.stop()

    @contextlib.contextmanager
    def engine(self, node: Node, model: str, split: Split) -> Iterator[Engine]:
        """An engine that serves."""
        self._number += 1
        flags = ["-tp", str(split.tp), "-pp", str(split.pp)]
        if split.pp > 1:
            flags.append("--no-enforce-eager")
        name = f"{model}-{split}-{self._number}"
        engine = Engine(name, folder(model), free_port(), self._logs, store=node.transfer_config, flags=flags)
        try:
            engine.started += COMPILE_S if split.pp > 1 else 0.0
            engine.wait_ready()
            engine.ask("Wake up.", 1)  # the first forward pass, and the first word with the node
            yield engine
        finally:
            engine.stop()

    def play(self, pair: Pair) -> Outcome:
        """One pair, on a node of its own."""
        with self.node() as node:
            with self.engine(node, pair.model, pair.writer) as writer:
                hand_off = writer.prefill(PROMPT)
                expected = objects_of(hand_off["kvstore"]["tokens"])
                wait_until(lambda: len(ready(node)) == expected, PUSH_S, "all objects stored")
            chain = kept(node)
            with self.engine(node, pair.model, pair.reader) as reader:
                pulled = reader.ask(PROMPT, GENERATED_TOKENS, hand_off=hand_off)
                computed = reader.ask(PROMPT, GENERATED_TOKENS, salt="computed here")
                wait_until(lambda: len(ready(node)) == 2 * expected, PUSH_S, "all objects stored again")
            again = [lanes for key, lanes in kept(node).items() if key not in chain]
            worst = max(map(difference, chain.values(), again))
            reasons = {
                reason: node.gauge("kvstore_missed_tokens_total", reason=reason) for reason in MissReason
            }
        missed = ", ".join(f"{reason} {tokens:.0f}" for reason, tokens in reasons.items() if tokens)
        return Outcome(pair, pulled, computed, expected, worst, missed)


def patient(transfer_config: str) -> str:
    """With more ranks than cores, a second is short."""
    config = json.loads(transfer_config)
    config["kv_connector_extra_config"] |= {"lookup_timeout_s": 30.0, "request_timeout_s": 10.0}
    return json.dumps(config)


def folder(model: str) -> Path:
    """Where the model lies; the random one is made when it is first needed."""
    if model == "smollm2":
        return MODEL
    if not RANDOM.exists():
        make_model(RANDOM, MODEL)
    return RANDOM


def objects_of(prompt_tokens: int) -> int:
    """Chunks of 256 tokens, and the whole blocks behind them."""
    chunks, rest = divmod(prompt_tokens, 256)
    return chunks + (rest >= BLOCK_TOKENS)


def ready(node: Node) -> list[dict[str, object]]:
    """What the node holds."""
    return [view for view in node.objects() if view["tiers"].get("dram") == "ready"]


def kept(node: Node) -> dict[str, NDArray[np.float32]]:
    """Every object's lanes, in the order of their depth; all of one namespace, whatever engine wrote them."""
    views = sorted(ready(node), key=lambda view: str(view["depth"]))
    [name] = {str(view["namespace"]) for view in views}
    namespace = Namespace(bytes.fromhex(name))
    objects: dict[str, NDArray[np.float32]] = {}
    with KVStore(node.control) as store:
        manifest = store.manifest(namespace)
        assert manifest is not None, "the index has lost the namespace"
        store.open(manifest)
        for view in views:
            data = store.get(namespace, Key(bytes.fromhex(str(view["key"]))))
            assert data is not None, f"object {view['key']} cannot be read"
            objects[str(view["key"])] = data.view(np.float32).reshape(manifest.geometry.num_runs, -1)
    return objects


def difference(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The largest difference in any lane, as a share of the lane's largest value."""
    scale = np.abs(one).max(axis=1, keepdims=True)
    assert scale.min() > 0, "a lane of zeros"
    return float((np.abs(one - other) / scale).max())


def main(arguments: Sequence[str]) -> int:
    """Plays all pairs; 0 if every one is as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the names of the pairs to play")
    parser.add_argument("--logs", type=Path, default=Path(".cache/matrix"), help="folder for logs")
    options = parser.parse_args(arguments)
    options.logs.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # more ranks than cores
    os.environ["OMP_NUM_THREADS"] = "1"
    bad = 0
    for pair in [pair for pair in PAIRS if options.only.lower() in pair.name.lower()]:
        began = time.monotonic()
        try:
            outcome = Stage(options.logs).play(pair)
        except (DemoFailed, AssertionError) as failure:
            bad += 1
            print(f"{pair.name:22} FAILED: {failure}", flush=True)
            continue
        bad += bool(outcome.faults)
        print(f"{outcome}  ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
