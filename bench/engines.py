"""Real engines with this store and with what people would use instead: time to first token, and 50 mixed requests.

    local     vLLM's own prefix cache, in one engine: the limit
    tcp       this store, bytes by Mooncake over loopback TCP
    shm       this store, bytes through shared memory
    mooncake  vLLM's MooncakeStoreConnector on a Mooncake Store of its own (master, owner), over loopback TCP
    cold      computed

The prompts are computed and pushed by an engine of each store, which then ends; fresh engines find them. Before every
hit an engine's own prefix cache is emptied. All answer in turns and must say the same: SmolLM2-135M in fp32, greedy,
all engines with equally many threads. The mixed requests are ten conversations of five turns; every turn finds what
the last one left in the store, as on an engine that has not seen the conversation.

    python bench/engines.py [--full] [--json]
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from bench._harness import Report, Samples, Wrong, finish_all, interleave, parse_arguments, run
from bench._mooncake_store import MooncakePool
from deploy.demo.engine import Engine, Prompt
from deploy.demo.node import Node
from tests.support import free_port, wait_until

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache/models/SmolLM2-135M-Instruct"
LENGTHS = (511, 1_919)
AIM_LENGTH = 1_919
BLOCK_TOKENS = 128  # vLLM's block size on CPU
BYTES_PER_TOKEN = 46_080  # of KV, SmolLM2 in fp32
TOKENS = 16
PUSH_S = 120.0
PAIRS, PAIRS_FULL = 7, 21
CONVERSATIONS, TURNS = 10, 5
SEGMENT_BYTES = 2 << 30
AIMS = {"shm_vs_local": 1.3, "tcp_vs_local": 2.0}
AIM_MOONCAKE = 2.5


def prompt_of(length: int) -> list[int]:
    """Token ids that no other length begins with."""
    return [(length * 7 + at * 31) % 40_000 + 100 for at in range(length)]


def mooncake_config(stack: ExitStack, folder: Path) -> str:
    """A Mooncake Store is started; the value of --kv-transfer-config."""
    pool = stack.enter_context(MooncakePool(folder / "mooncake", SEGMENT_BYTES))
    file = folder / "mooncake.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": pool.master,
        "protocol": "tcp",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 256 << 20,
    }
    file.write_text(json.dumps(settings))
    os.environ["MOONCAKE_CONFIG_PATH"] = str(file)
    os.environ["MC_FORCE_TCP"] = "1"
    return json.dumps(
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    )


def our_config(node: Node, transfer: str) -> str:
    """The value of --kv-transfer-config for this store."""
    config = json.loads(node.transfer_config)
    config["kv_connector_extra_config"] |= {"transfer": transfer, "load_policy": "always"}
    return json.dumps(config)


class Bench:
    """An engine, and what is asked of it. All engines must say the same: `said` is shared."""

    def __init__(self, engine: Engine, said: dict[str, str]) -> None:
        self.engine = engine
        self._said = said
        self._salts = count()

    def pulled(self, length: int) -> float:
        """Seconds to the first token of a prompt that its store has."""
        self.engine.forget_local_prefixes()
        return self._ask(length, pulled=length // BLOCK_TOKENS * BLOCK_TOKENS, local=0)

    def local(self, length: int) -> float:
        """Of one that its own cache has."""
        return self._ask(length, pulled=0, local=length // BLOCK_TOKENS * BLOCK_TOKENS)

    def cold(self, length: int) -> float:
        """Of one that nobody has."""
        return self._ask(length, pulled=0, local=0, salt=f"cold {next(self._salts)}")

    def turn(self, prompt: Prompt) -> float:
        """Seconds of one turn of a conversation; everything that it finds it finds in the store."""
        self.engine.forget_local_prefixes()
        began = time.perf_counter()
        answer = self.engine.complete(prompt, TOKENS)
        took_s = time.perf_counter() - began
        self._agree(json.dumps(prompt), answer or "")
        return took_s

    def _ask(self, length: int, *, pulled: int, local: int, salt: str | None = None) -> float:
        answer = self.engine.ask(prompt_of(length), TOKENS, salt=salt)
        if (answer.pulled, answer.local) != (pulled, local):
            raise Wrong(
                f"{self.engine.name}, {length} tokens: {answer.pulled} pulled and {answer.local} local, "
                f"not {pulled} and {local}"
            )
        self._agree(str(length), answer.text)
        return answer.first_token_s

    def _agree(self, prompt: str, answer: str) -> None:
        if self._said.setdefault(prompt, answer) != answer:
            raise Wrong(f"{self.engine.name} says {answer!r}, another {self._said[prompt]!r}")


def start(stack: ExitStack, logs: Path, name: str, store: str, said: dict[str, str]) -> Bench:
    """An engine that is ready."""
    engine = Engine(name, MODEL, free_port(), logs, store=store)
    stack.callback(engine.stop)
    engine.wait_ready()
    return Bench(engine, said)


def push(logs: Path, name: str, store: str, stored: Callable[[], bool]) -> None:
    """An engine computes the prompts, pushes them and ends."""
    with ExitStack() as stack:
        writer = start(stack, logs, f"{name}-writer", store, {})
        for length in LENGTHS:
            writer.engine.ask(prompt_of(length), 1)
        wait_until(stored, PUSH_S, "what was computed is stored")
        writer.engine.forget_local_prefixes()  # succeeds when no push is under way any more


def conversation(number: int, turn: int) -> list[int]:
    """The prompt of a turn: all that was said before, and some more."""
    return [(number * 7_919 + at * 37) % 40_000 + 100 for at in range(260 + 260 * turn)]


def mixed(benches: dict[str, Bench]) -> Report:
    """Fifty requests of each engine, in turns."""
    report = Report(
        f"{CONVERSATIONS * TURNS} requests: {CONVERSATIONS} conversations of {TURNS} turns", "requests/s"
    )
    taken: dict[str, list[float]] = {name: [] for name in benches}
    for turn in range(TURNS):
        for number in range(CONVERSATIONS):
            for name, bench in benches.items():
                taken[name].append(bench.turn(conversation(number, turn)))
    samples = {name: Samples((len(seconds) / sum(seconds),)) for name, seconds in taken.items()}
    report.row("all", samples, against=("tcp", "mooncake"))
    return report


def first_tokens(report: Report, benches: dict[str, Bench], pairs: int) -> None:
    """Rows for each length, and the aims."""
    tcp = benches["tcp"]
    for length in LENGTHS:
        samples = interleave(
            {
                "tcp": partial(tcp.pulled, length),
                "local": partial(tcp.local, length),
                "shm": partial(benches["shm"].pulled, length),
                "mooncake": partial(benches["mooncake"].pulled, length),
                "cold": partial(tcp.cold, length),
            },
            pairs,
        )
        report.row(f"{length} tokens", samples, against=("tcp", "local"))
        median = {name: some.median for name, some in samples.items()}
        moved = length // BLOCK_TOKENS * BLOCK_TOKENS * BYTES_PER_TOKEN
        report.note(
            f"{length} tokens: {moved / 1e6:.0f} MB of KV; mooncake/tcp {median['mooncake'] / median['tcp']:.2f}, "
            f"cold/tcp {median['cold'] / median['tcp']:.1f}, shm/local {median['shm'] / median['local']:.2f}"
        )
        if length == AIM_LENGTH:
            for name, aim in AIMS.items():
                report.aim(name, median[name.split("_", 1)[0]] / median["local"], aim, "x", at_most=True)
            report.aim("mooncake_connector_vs_tcp", median["mooncake"] / median["tcp"], AIM_MOONCAKE, "x")


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    report = Report("Time to first token of a hit in a fresh engine", "s")
    said: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = Node(free_port(), free_port(), folder)
        stack.callback(node.stop)
        node.wait_ready()
        theirs = mooncake_config(stack, folder)
        objects = sum(-(-(length // BLOCK_TOKENS) // 2) for length in LENGTHS)
        push(folder, "ours", our_config(node, "mooncake"), lambda: node.gauge("kvstore_objects") >= objects)
        push(folder, "theirs", theirs, lambda: True)
        stores = {"tcp": our_config(node, "mooncake"), "shm": our_config(node, "shm"), "mooncake": theirs}
        benches = {name: start(stack, folder, name, store, said) for name, store in stores.items()}
        for name, bench in benches.items():
            report.note(f"first hit of the life of {name}: {bench.pulled(AIM_LENGTH):.2f} s")
        first_tokens(report, benches, PAIRS_FULL if arguments.full else PAIRS)
        if not arguments.json:
            report.finish(as_json=False)
            print(flush=True)
        others = mixed(benches)
    return finish_all((report, others), arguments.json) if arguments.json else others.finish(as_json=False)


if __name__ == "__main__":
    run(main)
