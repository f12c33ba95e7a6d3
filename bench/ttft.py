"""Time to first token of prompts of 500 to 8,000 tokens, by where their KV comes from.

cold: computed. pulled: from the node's memory, over Mooncake on loopback TCP. local: from the engine's own prefix
cache. One engine is asked all of it, in turns; the prompts were pushed by another engine, which is gone. A Llama with
random weights in fp32, because it must take 8,000 tokens and cold runs must end; 12 KiB of KV per token. What a hit
leaves, less than an engine block of 128 tokens, is computed in all of them. The breakdown is of the engine's own
connector, with a stopwatch (`bench/_timed.py`). The first hit of the engine's life is shown by itself.

    python bench/ttft.py [--full] [--json]
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median

from bench._harness import Report, Samples, Wrong, interleave, parse_arguments, run
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
PAIRS, PAIRS_FULL = 7, 21
PUSH_S = 120.0
AIM = 2.0
FLAGS = ("--max-model-len", str(POSITIONS))


def prompt_of(length: int) -> list[int]:
    """Token ids that no other length begins with."""
    return [(length * 7 + at * 31) % 40_000 + 100 for at in range(length)]


def whole_blocks(length: int) -> int:
    return length // BLOCK_TOKENS * BLOCK_TOKENS


class Bench:
    """The engine, and what is asked of it. `firsts` are the answers' first tokens: they must all agree."""

    def __init__(self, engine: Engine, stages: Path) -> None:
        self._engine = engine
        self._stages = stages
        self._salts = count()
        self._said: dict[int, str] = {}
        self.breakdown: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def cold(self, length: int) -> float:
        return self._ask(length, pulled=0, local=0, salt=f"cold {next(self._salts)}").first_token_s

    def pulled(self, length: int) -> float:
        self._engine.forget_local_prefixes()
        self._stages.write_text("")
        answer = self._ask(length, pulled=whole_blocks(length), local=0)
        sums: dict[str, float] = defaultdict(float)
        for line in self._stages.read_text().splitlines():
            entry = json.loads(line)
            sums[entry["stage"]] += entry["s"]
        if not sums["read"]:
            raise Wrong("the stopwatch has seen no read")
        for stage in STAGES:
            self.breakdown[length][stage].append(sums[stage])
        return answer.first_token_s

    def local(self, length: int) -> float:
        return self._ask(length, pulled=0, local=whole_blocks(length)).first_token_s

    def _ask(self, length: int, *, pulled: int, local: int, salt: str | None = None) -> Answer:
        answer = self._engine.ask(prompt_of(length), 1, salt=salt)
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


def push_all(stack: ExitStack, node: Node, logs: Path) -> None:
    """An engine computes the prompts, pushes them and ends."""
    writer = Engine("writer", model(), free_port(), logs, store=node.transfer_config, flags=FLAGS)
    stack.callback(writer.stop)
    writer.wait_ready()
    for length in LENGTHS:
        writer.prefill(prompt_of(length))
    objects = sum(-(-whole_blocks(length) // 256) for length in LENGTHS)
    wait_until(lambda: node.gauge("kvstore_objects", tier="dram") == objects, PUSH_S, "all objects stored")
    writer.stop()


def timed_config(node: Node) -> str:
    """The node's line, with the stopwatch, for an engine that only loads."""
    config = json.loads(node.transfer_config)
    config |= {"kv_connector": "TimedConnector", "kv_connector_module_path": "bench._timed"}
    config["kv_connector_extra_config"]["save"] = False
    return json.dumps(config)


def measure(stack: ExitStack, logs: Path, pairs: int) -> tuple[Bench, float, dict[int, dict[str, Samples]]]:
    """The bench, the time of the first hit, and the samples by length and kind."""
    node = Node(free_port(), free_port(), logs)
    stack.callback(node.stop)
    node.wait_ready()
    push_all(stack, node, logs)
    stages = logs / "stages"
    os.environ["KVSTORE_BENCH_STAGES"] = str(stages)
    os.environ["PYTHONPATH"] = (
        f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"  # the engine's processes know bench/
    )
    engine = Engine("reader", model(), free_port(), logs, store=timed_config(node), flags=FLAGS)
    stack.callback(engine.stop)
    engine.wait_ready()
    bench = Bench(engine, stages)
    first_s = bench.pulled(2_000)  # nothing has woken the engine up
    bench.breakdown.clear()
    kinds: dict[str, Callable[[int], float]] = {
        "pulled": bench.pulled,
        "local": bench.local,
        "cold": bench.cold,
    }
    asked = {(kind, length): ask for length in LENGTHS for kind, ask in kinds.items()}
    measured = {f"{kind} {length}": (lambda a=ask, n=length: a(n)) for (kind, length), ask in asked.items()}
    samples = interleave(measured, pairs)
    return (
        bench,
        first_s,
        {length: {kind: samples[f"{kind} {length}"] for kind in kinds} for length in LENGTHS},
    )


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    pairs = PAIRS_FULL if arguments.full else PAIRS
    report = Report("Time to first token", "s")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench, first_s, samples = measure(stack, logs, pairs)
    ratios = {
        length: report.row(f"{length} tokens", kinds, against=("pulled", "local"))
        for length, kinds in samples.items()
    }
    report.aim("pulled_vs_local_2000", ratios[2_000], AIM, "x", at_most=True)
    for length, stages in bench.breakdown.items():
        parts = ", ".join(f"{stage} {median(stages[stage]) * 1e3:.1f}" for stage in STAGES)
        report.note(f"pulled {length}, ms by stage: {parts}")
    usual_s = samples[2_000]["pulled"].median
    report.note(
        f"the first hit of the engine's life, 2000 tokens: {first_s:.3f} s, later ones {usual_s:.3f} s"
    )
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
