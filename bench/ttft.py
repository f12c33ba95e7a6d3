"""Time to first token of prompts of 500 to 8,000 tokens, by where their KV comes from.

cold: computed. pulled: from the node's memory, over Mooncake on loopback TCP. nvme: the same, after the node was
restarted, from a file through O_DIRECT and the node's memory. shm: from memory that the engine shares with the node.
local: from the engine's own prefix cache. All in turns, by one engine (shm: by another of its kind);
the prompts were pushed by a third, which is gone. A Llama with random weights in fp32, because it must take 8,000
tokens and cold runs must end; 12 KiB of KV per token. What a hit leaves, less than an engine block of 128 tokens, is
computed in all of them. The breakdown is of the engine's own connector, with a stopwatch (`bench/_timed.py`). The
first request of the engine's life is a hit, and shown by itself.

    python bench/ttft.py [--full] [--json]
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench._harness import Report, Samples, Wrong, interleave, parse_arguments, run
from bench._spinners import let_them_sleep
from bench._timed import STAGES
from deploy.demo.engine import Answer, Engine
from deploy.demo.node import Node
from tests.matrix.make_model import make_model
from tests.support import free_port, wait_until

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / ".cache/models/SmolLM2-135M-Instruct"
MODEL = ROOT / ".cache/models/random-llama-8k"
POSITIONS = 8_192
LENGTHS = (500, 2_000, 4_000, 8_000)
BLOCK_TOKENS = 128  # vLLM's block size on CPU
CHUNK_TOKENS = 256
BYTES_PER_TOKEN = 6 * 4 * 64 * 2 * 4  # of KV: layers, heads, K and V of 64 numbers in fp32
PAIRS, PAIRS_FULL = 7, 21
PUSH_S = 120.0
AIM = 2.0
FLAGS = ("--max-model-len", str(POSITIONS), "--num-gpu-blocks-override", "160")


def prompt_of(length: int) -> list[int]:
    """Token ids that no other length begins with."""
    return [(length * 7 + at * 31) % 40_000 + 100 for at in range(length)]


def whole_blocks(length: int) -> int:
    return length // BLOCK_TOKENS * BLOCK_TOKENS


def objects_of(length: int) -> int:
    """Chunks, and a tail if there is one."""
    return -(-whole_blocks(length) // CHUNK_TOKENS)


class Bench:
    """An engine, and what is asked of it: all answers to a prompt must agree."""

    def __init__(self, engine: Engine, stages: Path) -> None:
        self.engine = engine
        self._stages = stages
        self._salts = count()
        self._said: dict[int, str] = {}
        self.breakdown: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def cold(self, length: int) -> float:
        return self._ask(length, pulled=0, local=0, salt=f"cold {next(self._salts)}").first_token_s

    def meet(self, node: Node) -> None:
        """Asks until the node has heard of it."""
        known = node.gauge("kvstore_tokens_total", outcome="queried")

        def asked() -> bool:
            self.engine.complete([5 + next(self._salts)] * 300, 1)
            return node.gauge("kvstore_tokens_total", outcome="queried") > known

        wait_until(asked, 60, "the engine to find the node")

    def pulled(self, length: int, *, from_nvme: bool = False) -> float:
        self.engine.forget_local_prefixes()
        self._stages.write_text("")
        answer = self._ask(length, pulled=whole_blocks(length), local=0)
        if answer.from_nvme and not from_nvme:
            raise Wrong(f"{answer.from_nvme} of {answer.pulled} tokens came from NVMe")
        sums: dict[str, float] = defaultdict(float)
        for line in self._stages.read_text().splitlines():
            entry = json.loads(line)
            sums[entry["stage"]] += entry["s"]
        if not sums["read"]:
            raise Wrong("the stopwatch has seen no read")
        for stage in STAGES:
            self.breakdown[f"{'from NVMe' if from_nvme else 'from memory'}, {length}"][stage].append(
                sums[stage]
            )
        return answer.first_token_s

    def local(self, length: int) -> float:
        return self._ask(length, pulled=0, local=whole_blocks(length)).first_token_s

    def _ask(self, length: int, *, pulled: int, local: int, salt: str | None = None) -> Answer:
        let_them_sleep()
        answer = self.engine.ask(prompt_of(length), 1, salt=salt)
        if (answer.pulled, answer.local) != (pulled, local):
            raise Wrong(
                f"{length} tokens: {answer.pulled} pulled, {answer.local} local, not {pulled}, {local}"
            )
        if self._said.setdefault(length, answer.text) != answer.text:
            raise Wrong(f"{length} tokens: {answer.text!r}, and before {self._said[length]!r}")
        return answer


def model() -> Path:
    """Made when it is first needed."""
    if not MODEL.exists():
        make_model(MODEL, TOKENIZER, POSITIONS)
    return MODEL


class Store:
    """A node whose objects are on NVMe, too, as soon as they are committed; it may be restarted."""

    def __init__(self, stack: ExitStack, logs: Path) -> None:
        self._logs = logs
        self._ports = free_port(), free_port()
        self._flags = (
            "--nvme-path",
            str(logs / "nvme.img"),
            "--nvme-size-bytes",
            "1GiB",
            "--tiers-spill",
            "eager",
            "--dram-size-bytes",
            "512MiB",
        )
        self.node = self._start()
        stack.callback(self._stop)

    def _start(self) -> Node:
        node = Node(*self._ports, self._logs, flags=self._flags)
        node.wait_ready()
        return node

    def _stop(self) -> None:
        self.node.stop()

    @property
    def promoted(self) -> float:
        """Objects that this node has read from NVMe; as of half a second ago at worst."""
        return self.node.gauge("kvstore_promotion_objects_total")

    def restart(self) -> None:
        self._stop()
        self.node = self._start()
        if in_dram := self.node.gauge("kvstore_objects", tier="dram"):
            raise Wrong(f"{in_dram:.0f} objects in the memory of a node that has just started")


def push_all(stack: ExitStack, node: Node, logs: Path) -> None:
    """An engine computes the prompts, pushes them and ends."""
    writer = Engine("writer", model(), free_port(), logs, store=node.transfer_config, flags=FLAGS)
    stack.callback(writer.stop)
    writer.wait_ready()
    for length in LENGTHS:
        writer.prefill(prompt_of(length))
    objects = sum(map(objects_of, LENGTHS))
    wait_until(lambda: node.gauge("kvstore_objects", tier="nvme") == objects, PUSH_S, "all objects on NVMe")
    writer.stop()


def start_reader(stack: ExitStack, node: Node, logs: Path, transfer: str) -> "Bench":
    """An engine that only loads, with a stopwatch. Not ready yet."""
    config = json.loads(node.transfer_config)
    config |= {"kv_connector": "TimedConnector", "kv_connector_module_path": "bench._timed"}
    config["kv_connector_extra_config"] |= {"save": False, "transfer": transfer, "load_policy": "always"}
    stages = logs / f"stages-{transfer}"
    os.environ["BENCH_STAGES"] = str(stages)
    engine = Engine(transfer, model(), free_port(), logs, store=json.dumps(config), flags=FLAGS)
    stack.callback(engine.stop)
    return Bench(engine, stages)


class Measured(NamedTuple):
    """Seconds to the first token: the first hit of an engine's life, and samples by length and kind."""

    first_s: float
    samples: dict[int, dict[str, Samples]]


def measure(stack: ExitStack, logs: Path, pairs: int) -> tuple[Measured, Bench, Bench]:
    """What was measured, and the engines that moved bytes by Mooncake and by shared memory."""
    os.environ["PYTHONPATH"] = (
        f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"  # the engines' processes know bench/
    )
    store = Store(stack, logs)
    push_all(stack, store.node, logs)
    bench, beside = (start_reader(stack, store.node, logs, transfer) for transfer in ("mooncake", "shm"))
    for each in (bench, beside):
        each.engine.wait_ready()
    first_s = bench.pulled(2_000)  # nothing has woken the engine up

    def from_nvme(length: int) -> float:
        if length == LENGTHS[0]:  # from then on each length is asked for once before it is in memory again
            store.restart()
            bench.meet(store.node)
            beside.meet(store.node)
        before = store.promoted
        took_s = bench.pulled(length, from_nvme=True)
        expected = before + objects_of(
            length
        )  # some before their lease: the lookup has the node prefetch them
        wait_until(
            lambda: store.promoted == expected, 10, f"{objects_of(length)} objects to be read from NVMe"
        )
        return took_s

    kinds = {
        "nvme": from_nvme,
        "pulled": bench.pulled,
        "local": bench.local,
        "cold": bench.cold,
        "shm": beside.pulled,
    }
    measured = {f"{kind} {length}": partial(ask, length) for length in LENGTHS for kind, ask in kinds.items()}
    samples = interleave(measured, pairs)
    by_length = {length: {kind: samples[f"{kind} {length}"] for kind in kinds} for length in LENGTHS}
    return Measured(first_s, by_length), bench, beside


def note_stages(report: Report, bench: Bench, name: str) -> None:
    """Medians of the stages, the first round left out."""
    for what, stages in bench.breakdown.items():
        parts = ", ".join(f"{stage} {median(stages[stage][1:]) * 1e3:.1f}" for stage in STAGES)
        report.note(f"{name}, {what}, ms by stage: {parts}")


def note_above_local(report: Report, length: int, kinds: Mapping[str, Samples]) -> None:
    """What a hit costs beyond what the engine computes anyway, which is little here: a ratio of whole times says more
    about the model than about the store."""
    local = kinds["local"].median
    above = ", ".join(
        f"{kind} {(kinds[kind].median - local) * 1e3:.0f}" for kind in ("pulled", "nvme", "shm")
    )
    moved = whole_blocks(length) * BYTES_PER_TOKEN / 1e6
    report.note(f"{length} tokens, {moved:.0f} MB of KV, ms above local: {above}")


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    pairs = PAIRS_FULL if arguments.full else PAIRS
    report = Report("Time to first token", "s")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (first_s, samples), bench, beside = measure(stack, logs, pairs)
    for length, kinds in samples.items():
        ratio = report.row(f"{length} tokens", kinds, against=("pulled", "local"))
        note_above_local(report, length, kinds)
        if length == 2_000:
            report.aim("pulled_vs_local_2000", ratio, AIM, "x", at_most=True)
            report.aim(
                "shm_vs_local_2000", kinds["shm"].median / kinds["local"].median, AIM, "x", at_most=True
            )
    note_stages(report, bench, "mooncake")
    note_stages(report, beside, "shm")
    report.note(f"the first request of the engine's life, a hit of 2000 tokens: {first_s:.3f} s")
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
