"""What the connector costs an engine when nothing is found: prompts a second, with a store and with a dead one.

off: `vllm serve` without a connector. on: with a store, into which every prompt is pushed. dead: with a store that
was killed, after the breaker has opened. Every prompt is new to its engine, so nothing is ever pulled; all three
engines are asked the same prompts, some at a time, in turns, and must say the same. One run is 8 prompts of about
300 tokens, 4 at a time, with 8 generated tokens each. fp32 on CPU: engine, node and Redis share the same cores, so
that the work of a push is taken from the computation, which on a GPU it would not be. All engines compute with the
same number of threads, one less than there are cores: by itself vLLM gives those with a connector another number.

    python bench/overhead.py [--full] [--json]
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

from bench._harness import Report, Wrong, interleave, parse_arguments, run
from deploy.demo.engine import Engine
from deploy.demo.node import Node
from tests.support import free_port, wait_until

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache/models/SmolLM2-135M-Instruct"
TEXT = (ROOT / "deploy/demo/prompts/canal.txt").read_text()
PROMPT_CHARACTERS = 1_350
PROMPTS_PER_RUN, AT_ONCE, GENERATED_TOKENS = 8, 4, 8
PAIRS, PAIRS_FULL = 8, 24  # 64 and 192 prompts per engine
AIM_ON, AIM_DEAD = 0.93, 0.97

Answers = dict[str, str]


def prompt_of(number: int) -> str:
    """A prompt that differs from all others from its first token on."""
    start = number * 97 % (len(TEXT) - PROMPT_CHARACTERS)
    return f"{number}. {TEXT[start : start + PROMPT_CHARACTERS]}"


def measured(engine: Engine, answers: Answers, numbers: "count[int]") -> float:
    """Prompts a second of one run. The same prompts go to every engine, in the same order."""
    prompts = [prompt_of(next(numbers)) for _ in range(PROMPTS_PER_RUN)]
    began = perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        said = list(clients.map(lambda prompt: engine.complete(prompt, GENERATED_TOKENS), prompts))
    took_s = perf_counter() - began
    for prompt, answer in zip(prompts, said, strict=True):
        if answer is None or answers.setdefault(prompt, answer) != answer:
            raise Wrong(
                f"{engine.name} answers {answer!r} to prompt {prompt[:10]!r}, another {answers[prompt]!r}"
            )
    return PROMPTS_PER_RUN / took_s


def start_node(stack: ExitStack, logs: Path, name: str) -> Node:
    """A node that is ready."""
    node = Node(free_port(), free_port(), logs, name=name)
    stack.callback(node.stop)
    node.wait_ready()
    return node


def start_engines(stack: ExitStack, logs: Path, stores: dict[str, str | None]) -> dict[str, Engine]:
    """One engine for each kind; all are ready."""
    engines = {}
    for name, store in stores.items():
        engines[name] = Engine(name, MODEL, free_port(), logs, store=store)
        stack.callback(engines[name].stop)
    for engine in engines.values():
        engine.wait_ready()
        engine.complete("Only to wake the engine up.", 2)
    return engines


def runs_of(engines: dict[str, Engine]) -> dict[str, Callable[[], float]]:
    """What is measured of each engine."""
    answers: Answers = {}
    return {name: partial(measured, engine, answers, count()) for name, engine in engines.items()}


def main() -> int:
    arguments = parse_arguments(__doc__ or "")
    pairs = PAIRS_FULL if arguments.full else PAIRS
    report = Report("Throughput of an engine that finds nothing", "prompts/s")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node, doomed = (start_node(stack, logs, name) for name in ("alive", "doomed"))
        stores = {"off": None, "on": node.transfer_config, "dead": doomed.transfer_config}
        engines = start_engines(stack, logs, stores)
        if engines["dead"].complete(prompt_of(-1), 1) is None:
            raise Wrong("the engine does not answer")
        wait_until(
            lambda: doomed.gauge("kvstore_objects") > 0, 30, "a push into the store that will be killed"
        )
        doomed.kill()
        samples = interleave(runs_of(engines), pairs)
        pushed = wait_until(lambda: node.gauge("kvstore_objects"), 30, "any push")
        check(engines, pushed, (pairs + 1) * PROMPTS_PER_RUN)
    on = report.row("with a store", samples, against=("on", "off"))
    dead = report.row("with a dead store", samples, against=("dead", "off"))
    report.aim("throughput_on_vs_off", on, AIM_ON, "x")
    report.aim("throughput_dead_vs_off", dead, AIM_DEAD, "x")
    report.note(
        f"{pairs * PROMPTS_PER_RUN} prompts per engine; {pushed:.0f} objects pushed; SmolLM2-135M in fp32"
    )
    return report.finish(arguments.json)


def check(engines: dict[str, Engine], pushed: float, prompts: int) -> None:
    """What was measured is what is said: everything computed, and with the store everything pushed."""
    if pushed < prompts:
        raise Wrong(f"{pushed:.0f} objects were pushed of {prompts} prompts")
    for name, engine in engines.items():
        if given := engine.tokens_by_source()["external_kv_transfer"]:
            raise Wrong(f"{name} was given {given} tokens by the store")


if __name__ == "__main__":
    run(main)
