"""So little room for KV that running requests are preempted again and again: the same tokens, and every count agrees.

A preempted request comes back to the store with what it had computed itself; its blocks may still be on their way
into the store when they are taken from it.
"""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.demo.engine import Engine
from deploy.demo.node import Node
from tests.e2e.fleet import FORGETFUL, Prompts
from tests.e2e.support import external, transfer_config, wait_for_nothing_held
from tests.support import free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3_000)]

REQUESTS, AT_ONCE = 100, 6
PROMPTS = 20  # each is asked for several times, so that most of it is pulled
GENERATED_TOKENS = 60
BLOCKS = 17  # one is vLLM's null block; six requests want up to 36


def test_preempted_requests_say_the_same(model_path: Path, repository: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    with contextlib.ExitStack() as exits:
        node = Node(free_port(), free_port(), tmp_path)
        exits.callback(node.stop)
        node.wait_ready()
        flags = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024", *FORGETFUL]
        config = transfer_config(node.control)
        engine = Engine("engine", model_path, free_port(), tmp_path, store=config, flags=flags)
        exits.callback(engine.stop)
        engine.wait_ready()
        source = Prompts(model_path, repository)
        prompts = [source.cut(rng.randrange(260, 640)) for _ in range(PROMPTS)]
        alone = [engine.complete(prompt, GENERATED_TOKENS, salt="alone") for prompt in prompts]
        assert engine.metric("vllm:num_preemptions_total") == 0, "one request has room"
        asked = [number % PROMPTS for number in range(REQUESTS)]
        rng.shuffle(asked)
        with ThreadPoolExecutor(AT_ONCE) as clients:
            said = list(clients.map(lambda n: engine.complete(prompts[n], GENERATED_TOKENS), asked))
        wrong = [n for n, text in zip(asked, said, strict=True) if text != alone[n]]
        preempted = engine.metric("vllm:num_preemptions_total")
        print(f"{preempted:.0f} preemptions; {engine.tokens_by_source()}")
        assert not wrong
        assert preempted > REQUESTS / 10
        wait_for_nothing_held(node, 60)
        engine.forget_local_prefixes()  # refused while a block is in use
        assert_counters_agree(engine, node)


def assert_counters_agree(engine: Engine, node: Node) -> None:
    """Tokens queried, promised and pulled are the same at the node and in vLLM."""
    engine.complete("So that the engine takes another step.", 1)
    queried, promised = external(engine)
    total = "kvstore_tokens_total"
    wait_until(lambda: node.gauge(total, outcome="queried") >= queried, 10, "the last reports")
    counted = {word: int(node.gauge(total, outcome=word)) for word in ("queried", "promised", "pulled")}
    missed = int(node.gauge("kvstore_missed_tokens_total"))
    print(f"{counted}, {missed} missed; vLLM: {queried} queried, {promised} hits")
    assert (counted["queried"], counted["promised"]) == (queried, promised)
    assert counted["pulled"] + missed == counted["queried"]
    assert counted["pulled"] > counted["queried"] / 4, "little was had from the store"
