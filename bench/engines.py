"""Real engines with this store and with what people would use instead: time to first token, and 50 mixed requests.

    local     vLLM's own prefix cache, in an engine without a connector: the limit
    cold      the same engine, which computes everything
    tcp       this store, bytes by Mooncake over loopback TCP
    shm       this store, bytes through shared memory
    mooncake  vLLM's MooncakeStoreConnector on a Mooncake Store of its own (master, owner), over loopback TCP
    lmcache   vLLM's LMCacheMPConnector on LMCache's multi-process server, through shared memory; with --full

The prompts are computed and pushed by an engine of each store, which then ends; fresh engines find them. Before each
hit an engine's own prefix cache is emptied, and the engine that was asked before goes to sleep (`_spinners`). All
answer in turns and must say the same: SmolLM2-135M in fp32, greedy, all engines with equally many threads. Prompts
end 127 tokens after their last whole block, which all of them compute (of 1,800 tokens: 8). `above local` is what is
left of a hit when that is taken away.

A peer that does not find what it had stored is asked again, and how often is said; this store has to find it.

The mixed requests are ten conversations of five turns, four at a time; between two turns an engine's own cache is
emptied, as if another engine had had the turn before, so that all that was said comes from the store.

    python bench/engines.py [--full] [--json]      ten minutes; --full: a longer prompt, LMCache, twenty-five
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench._harness import Report, Samples, Wrong, finish_all, interleave, parse_arguments, run
from bench._lmcache import LmcacheServer
from bench._mooncake_store import MooncakePool
from bench._spinners import let_them_sleep
from deploy.demo.engine import Engine
from deploy.demo.node import Node
from tests.support import free_port, wait_until

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache/models/SmolLM2-135M-Instruct"
FLAGS = ("--max-model-len", "8192", "--kv-cache-memory-bytes", str(448 << 20))
PLAIN_FLAGS = ("--max-model-len", "8192")  # a whole GiB: its own cache holds all conversations
LENGTHS = (511, 1_800, 1_919)
LENGTHS_FULL = (*LENGTHS, 3_711)
AIM_LENGTH = 1_919
COLD_IN_TURNS = (511, 1_919)  # the others are computed once
BLOCK_TOKENS = 128  # vLLM's block size on CPU
LMCACHE_TOKENS = 256  # of its chunks
BYTES_PER_TOKEN = 46_080  # of KV, SmolLM2 in fp32
TOKENS, MIXED_TOKENS = 16, 8
PUSH_S = 120.0
PEER_TRIES = 4
PAIRS, PAIRS_FULL = 7, 11
CONVERSATIONS, TURNS, AT_ONCE = 10, 5, 4
STORE_GIB = 2
AIMS = {"shm_vs_local": 1.3, "tcp_vs_local": 2.0}
AIM_MOONCAKE = 2.5


class Store(NamedTuple):
    """What an engine is started with, and how many tokens there are in the least that it finds."""

    config: str | None
    env: Mapping[str, str] = {}
    unit_tokens: int = BLOCK_TOKENS
    tries: int = PEER_TRIES


class Missed(Wrong):
    """A store did not find what it has."""


def prompt_of(length: int) -> list[int]:
    """Token ids that no other length begins with."""
    return [(length * 7 + at * 31) % 40_000 + 100 for at in range(length)]


def conversation(number: int, turn: int) -> list[int]:
    """The prompt of a turn: all that was said before, and some more."""
    return [(number * 7_919 + at * 37) % 40_000 + 100 for at in range(260 + 20 * number + 130 * turn)]


def mooncake(stack: ExitStack, folder: Path) -> Store:
    """A Mooncake Store is started: the connector's defaults, memory in a process of its own."""
    pool = stack.enter_context(MooncakePool(folder / "mooncake", STORE_GIB << 30))
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
    config = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return Store(json.dumps(config), {"MOONCAKE_CONFIG_PATH": str(file), "MC_FORCE_TCP": "1"})


def lmcache(stack: ExitStack, folder: Path) -> Store:
    """LMCache's server is started."""
    server = stack.enter_context(LmcacheServer(folder / "lmcache", STORE_GIB))
    return Store(server.transfer_config, server.env, LMCACHE_TOKENS)


def ours(node: Node, transfer: str) -> Store:
    """This store."""
    config = json.loads(node.transfer_config)
    config["kv_connector_extra_config"] |= {"transfer": transfer, "load_policy": "always"}
    return Store(json.dumps(config), tries=1)


class Bench:
    """An engine, and what is asked of it. All engines must say the same: `said` is shared."""

    def __init__(self, engine: Engine, store: Store, said: dict[str, str]) -> None:
        self.engine = engine
        self.missed = 0
        self._store = store
        self._said = said
        self._salts = count()

    def pulled(self, length: int) -> float:
        """Seconds to the first token of a prompt that its store has."""
        unit_tokens = self._store.unit_tokens
        for tries_left in reversed(range(self._store.tries)):
            self.engine.forget_local_prefixes()
            try:
                return self._ask(length, pulled=length // unit_tokens * unit_tokens, local=0)
            except Missed:
                self.missed += 1
                if not tries_left:
                    raise
        raise AssertionError("it is tried at least once")

    def local(self, length: int) -> float:
        """Of one that its own cache has."""
        return self._ask(length, pulled=0, local=length // BLOCK_TOKENS * BLOCK_TOKENS)

    def cold(self, length: int) -> float:
        """Of one that nobody has."""
        return self._ask(length, pulled=0, local=0, salt=f"cold {next(self._salts)}")

    def turn(self, kind: str, turn: int) -> float:
        """Seconds for one turn of all conversations."""
        if kind not in {"local", "cold"}:
            self.engine.forget_local_prefixes()

        def ask(number: int) -> None:
            salt = f"cold {turn} {number}" if kind == "cold" else kind  # tcp and shm have one node
            answer = self.engine.complete(conversation(number, turn), MIXED_TOKENS, salt=salt)
            self._agree(f"turn {turn} of conversation {number}", answer or "")

        let_them_sleep()
        began = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as clients:
            list(clients.map(ask, range(CONVERSATIONS)))
        return time.perf_counter() - began

    def _ask(self, length: int, *, pulled: int, local: int, salt: str | None = None) -> float:
        let_them_sleep()
        answer = self.engine.ask(prompt_of(length), TOKENS, salt=salt)
        if (answer.pulled, answer.local) != (pulled, local):
            raise (Missed if answer.pulled + answer.local < pulled else Wrong)(
                f"{self.engine.name}, {length} tokens: {answer.pulled} pulled and {answer.local} local, "
                f"not {pulled} and {local}"
            )
        self._agree(str(length), answer.text)
        return answer.first_token_s

    def _agree(self, prompt: str, answer: str) -> None:
        if self._said.setdefault(prompt, answer) != answer:
            raise Wrong(f"{self.engine.name} says {answer!r} to {prompt}, another {self._said[prompt]!r}")


def start(stack: ExitStack, logs: Path, name: str, store: Store, said: dict[str, str]) -> Bench:
    """An engine that is ready."""
    flags = FLAGS if store.config else PLAIN_FLAGS
    engine = Engine(name, MODEL, free_port(), logs, store=store.config, flags=flags, env=store.env)
    stack.callback(engine.stop)
    engine.wait_ready()
    return Bench(engine, store, said)


def push(
    logs: Path, name: str, store: Store, lengths: Sequence[int], stored: Callable[[], bool] = lambda: True
) -> None:
    """An engine computes the prompts, pushes them and ends."""
    with ExitStack() as stack:
        writer = start(stack, logs, f"{name}-writer", store, {})
        for length in lengths:
            writer.engine.ask(prompt_of(length), 1)
        wait_until(stored, PUSH_S, "what was computed is stored")
        writer.engine.forget_local_prefixes()  # succeeds when no push is under way any more


def mixed(benches: Mapping[str, Bench]) -> Report:
    """Fifty requests of each engine, in turns."""
    report = Report(
        f"{CONVERSATIONS * TURNS} requests: {CONVERSATIONS} conversations of {TURNS} turns, {AT_ONCE} at a time",
        "requests/s",
    )
    kinds = {**benches, "cold": benches["local"]}
    pulled = {name: bench.engine.tokens_by_source()["external_kv_transfer"] for name, bench in kinds.items()}
    seconds = dict.fromkeys(kinds, 0.0)
    for turn in range(TURNS):
        for name, bench in kinds.items():
            seconds[name] += bench.turn(name, turn)
    samples = {name: Samples((CONVERSATIONS * TURNS / taken,)) for name, taken in seconds.items()}
    report.row("all", samples, against=("tcp", "mooncake"))
    asked = sum(len(conversation(number, turn)) for number in range(CONVERSATIONS) for turn in range(TURNS))
    for name, bench in benches.items():
        came = bench.engine.tokens_by_source()["external_kv_transfer"] - pulled[name]
        if not came and name != "local":
            raise Wrong(f"{name} pulled nothing")
        report.note(f"{name}: {came:,} of {asked:,} prompt tokens pulled")
    return report


def first_tokens(report: Report, benches: Mapping[str, Bench], lengths: Sequence[int], pairs: int) -> None:
    """Rows for each length, and the aims."""
    plain = benches["local"]
    for length in lengths:
        once = {} if length in COLD_IN_TURNS else {"cold": Samples((plain.cold(length),))}
        plain.engine.ask(prompt_of(length), 1)  # now its own cache has it
        measured = {
            "tcp": partial(benches["tcp"].pulled, length),
            "local": partial(plain.local, length),
            **{name: partial(bench.pulled, length) for name, bench in benches.items() if bench is not plain},
            **({} if once else {"cold": partial(plain.cold, length)}),
        }
        samples = interleave(measured, pairs) | once
        report.row(f"{length} tokens", samples, against=("tcp", "local"))
        median = {name: some.median for name, some in samples.items()}
        report.note(said_of(length, median))
        if length == AIM_LENGTH:
            for name, aim in AIMS.items():
                report.aim(name, median[name.split("_", 1)[0]] / median["local"], aim, "x", at_most=True)
            report.aim("mooncake_connector_vs_tcp", median["mooncake"] / median["tcp"], AIM_MOONCAKE, "x")


def said_of(length: int, median: Mapping[str, float]) -> str:
    """What the row of a length says."""
    moved = length // BLOCK_TOKENS * BLOCK_TOKENS * BYTES_PER_TOKEN
    stores = [name for name in median if name not in {"local", "cold"}]
    above = {name: median[name] - median["local"] for name in stores}
    return (
        f"{length} tokens, {moved / 1e6:.0f} MB of KV; above local: "
        + ", ".join(f"{name} {1e3 * above[name]:.0f} ms" for name in stores)
        + f"; mooncake/tcp {median['mooncake'] / median['tcp']:.2f}, above local "
        f"{above['mooncake'] / above['tcp']:.1f}; shm/local {median['shm'] / median['local']:.2f}, "
        f"cold/tcp {median['cold'] / median['tcp']:.1f}"
    )


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    report = Report("Time to first token of a hit in a fresh engine", "s")
    lengths = LENGTHS_FULL if arguments.full else LENGTHS
    said: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = Node(free_port(), free_port(), folder)
        stack.callback(node.stop)
        node.wait_ready()
        others = {"mooncake": mooncake(stack, folder)}
        if arguments.full:
            others["lmcache"] = lmcache(stack, folder)
        objects = sum(-(-(length // BLOCK_TOKENS) // 2) for length in lengths)
        push(
            folder, "ours", ours(node, "mooncake"), lengths, lambda: node.gauge("kvstore_objects") >= objects
        )
        for name, store in others.items():
            push(folder, name, store, lengths)
        stores = {"tcp": ours(node, "mooncake"), "shm": ours(node, "shm"), **others, "local": Store(None)}
        benches = {name: start(stack, folder, name, store, said) for name, store in stores.items()}
        for name in ("tcp", "shm", *others):
            report.note(f"first hit of the life of {name}: {benches[name].pulled(AIM_LENGTH):.2f} s")
        first_tokens(report, benches, lengths, PAIRS_FULL if arguments.full else PAIRS)
        for name, bench in benches.items():
            if bench.missed:
                report.note(f"{name} did not find what it had stored {bench.missed} times; asked again")
        if not arguments.json:
            report.show_table()
        throughput = mixed(benches)
    if arguments.json:
        return finish_all((report, throughput), as_json=True)
    throughput.show_table()
    report.show_aims()
    return 0


if __name__ == "__main__":
    run(main)
