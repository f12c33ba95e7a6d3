"""The acts of the demo: each does one thing to real processes, and says what came of it."""

import contextlib
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deploy.demo.engine import Answer, DemoFailed, Engine
from deploy.demo.forge import forge_all
from deploy.demo.node import Node
from deploy.demo.ports import free_port
from deploy.demo.proxy import Proxy
from deploy.demo.report import say

PROMPT_TOKENS = {"tides": 639, "lighthouse": 1_919, "canal": 3_583}
GENERATED_TOKENS = 64
ENGINE_BLOCK_TOKENS = 128  # vLLM's block size on CPU
CHUNK_TOKENS = 256
WARM_UP = "This request is unrelated to the others; it only wakes the engine up."
PUSH_S_MAX, MEET_S_MAX = 60.0, 30.0
AS_BETWEEN_HOSTS = ("--no-transfer-shm",)  # bytes go through Mooncake, although all are on one host
DEVICE, DEVICE_SIZE = "nvme.img", "1GiB"

Answers = dict[str, Answer]


@dataclass
class Stage:
    """What the acts share."""

    model: Path
    logs: Path
    exits: contextlib.ExitStack
    prompts: dict[str, str]

    @property
    def device(self) -> Path:
        """The file that is the node's NVMe device."""
        return self.logs / DEVICE

    def engine(self, name: str, store: str | None) -> Engine:
        """Starts an engine that ends with the demo at the latest."""
        engine = Engine(name, self.model, free_port(), self.logs, store=store)
        self.exits.callback(engine.stop)
        return engine


class Pair(NamedTuple):
    """A prefill and a decode engine behind a proxy."""

    prefill: Engine
    decode: Engine
    proxy: Proxy


def baseline(stage: Stage) -> tuple[Answers, Answers]:
    """Act 1: every prompt cold, then again as a hit of the engine's own prefix cache."""
    say("Act 1: an engine without a store computes everything")
    engine = stage.engine("baseline", None)
    ready(engine)
    cold, local = {}, {}
    for name, prompt in stage.prompts.items():
        cold[name] = answer = engine.ask(prompt, GENERATED_TOKENS)
        local[name] = engine.ask(prompt, GENERATED_TOKENS)
        if answer.prompt_tokens != PROMPT_TOKENS[name]:
            raise DemoFailed(f"{name} has {answer.prompt_tokens} tokens, not {PROMPT_TOKENS[name]}")
        say(f"  {name}: {answer.prompt_tokens} tokens, first token after {answer.first_token_s:.2f} s cold")
    engine.stop()
    return cold, local


def push_and_die(stage: Stage, node: Node) -> None:
    """Act 2, first half: a prefill engine pushes the prompts and is killed."""
    say("Act 2: a prefill engine pushes into the store ...")
    prefill = stage.engine("prefill", node.transfer_config)
    say(f"  $ {shown(prefill.command)}")
    ready(prefill)
    for prompt in stage.prompts.values():
        prefill.prefill(prompt)
    expected = sum(objects_of(tokens) for tokens in PROMPT_TOKENS.values())
    deadline = time.monotonic() + PUSH_S_MAX
    while committed(node) < expected:
        if time.monotonic() > deadline:
            raise DemoFailed(f"{committed(node)} of {expected} objects were committed", prefill.log_path)
        time.sleep(0.05)
    prefill.kill()
    stored = node.gauge("kvstore_object_bytes", tier="dram")
    say(f"  ... {expected} objects ({stored / 1e6:.0f} MB) are committed; prefill is SIGKILLed and gone")


def fresh_pair(stage: Stage, node: Node) -> Pair:
    """Prefill and decode that never saw a prompt, and the proxy that makes them one server."""
    say("  a fresh prefill and a fresh decode engine start, and a proxy in front of them")
    prefill, decode = (stage.engine(name, node.transfer_config) for name in ("prefill-2", "decode"))
    ready(prefill)
    ready(decode)
    proxy = Proxy([prefill], [decode], free_port(), stage.logs)
    stage.exits.callback(proxy.stop)
    say(f"  $ {shown(proxy.command)}")
    proxy.wait_ready()
    return Pair(prefill, decode, proxy)


def pull(stage: Stage, pair: Pair) -> tuple[Answers, dict[str, int]]:
    """Act 2, second half: what a client of the proxy gets, and the tokens of each prompt that prefill computed."""
    answers, prefilled = {}, {}
    for name, prompt in stage.prompts.items():
        before = pair.prefill.tokens_by_source()
        answers[name] = answer = pair.proxy.ask(prompt, GENERATED_TOKENS, pair.decode)
        after = pair.prefill.tokens_by_source()
        prefilled[name] = after["local_compute"] - before["local_compute"]
        pulled = after["external_kv_transfer"] - before["external_kv_transfer"]
        say(f"  {name}: prefill: {pulled} tokens pulled, {prefilled[name]} computed; decode: {told(answer)}")
    return answers, prefilled


def killed_while_pushing(stage: Stage, node: Node, pair: Pair) -> tuple[Answer, int]:
    """Act 3: what the proxy's client gets, and how many reservations the killed engine left behind."""
    say("Act 3: prefill is SIGKILLed in the middle of its push, and of a client's request")
    salt = "act three"  # the same prompt under keys of its own, so that nothing of it is stored yet
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(
            pair.proxy.ask, stage.prompts["canal"], GENERATED_TOKENS, pair.decode, salt=salt
        )
        try:
            left_behind = stop_while_pushing(node, pair.prefill)
        finally:
            pair.prefill.kill()
        say(f"  prefill died with {left_behind} objects half written; the proxy goes on with decode alone")
        answer = asked.result()
    say(f"  decode: {told(answer)}")
    return answer, left_behind


def stop_while_pushing(node: Node, prefill: Engine) -> int:
    """Stops the engine at a moment when it holds reservations, and says how many."""
    deadline = time.monotonic() + PUSH_S_MAX
    while time.monotonic() < deadline:
        if node.gauge("kvstore_reservations") > 0:
            prefill.signal(signal.SIGSTOP)  # and look again while it cannot move
            if (open_reservations := int(node.gauge("kvstore_reservations"))) > 0:
                return open_reservations
            prefill.signal(signal.SIGCONT)
    raise DemoFailed("the second prefill engine was never seen pushing", prefill.log_path)


def restarted(stage: Stage, node: Node, pair: Pair) -> tuple[Node, int, Answers]:
    """Act 4: the node that came back, the objects on its NVMe, and what the proxy's client gets then."""
    say(
        "Act 4: the node is stopped and started again, its memory empty; decode has forgotten everything as well"
    )
    node.stop()
    again = start_node(stage, name="kvstore-again", ports=node.ports)
    on_disk = int(again.gauge("kvstore_objects", tier="nvme"))
    say(f"  it is back with {committed(again)} objects in DRAM and {on_disk} on NVMe")
    pair.decode.forget_local_prefixes()
    meet(pair.decode, again)
    answers = {}
    for name, prompt in stage.prompts.items():
        answers[name] = answer = pair.proxy.ask(prompt, GENERATED_TOKENS, pair.decode)
        say(f"  {name}: decode: {told(answer)}")
    return again, on_disk, answers


def meet(engine: Engine, node: Node) -> None:
    """Wakes the engine up until the node has heard of it, which an engine without requests need not notice."""
    deadline = time.monotonic() + MEET_S_MAX
    while not node.gauge("kvstore_tokens_total", outcome="queried"):
        if time.monotonic() > deadline:
            raise DemoFailed(f"{engine.name} has not found the node again", engine.log_path)
        engine.ask(WARM_UP, 1)


def remove_device(logs: Path) -> None:
    """What an earlier demo has left on NVMe goes."""
    (logs / DEVICE).unlink(missing_ok=True)
    shutil.rmtree(logs / f"{DEVICE}.catalog", ignore_errors=True)


def start_node(stage: Stage, name: str, ports: tuple[int, int]) -> Node:
    """A node whose NVMe tier is a file; ready."""
    device = ("--nvme-path", str(stage.device), "--nvme-size-bytes", DEVICE_SIZE)
    node = Node(*ports, stage.logs, name=name, flags=(*AS_BETWEEN_HOSTS, *device))
    stage.exits.callback(node.stop)
    node.wait_ready()
    return node


def forged(stage: Stage, node: Node, pair: Pair) -> Answer:
    """The negative control: the answer of decode when the store holds other KV under the same keys."""
    count = forge_all(node)
    say(f"Control: {count} objects replaced by other KV under the same keys, with valid tables")
    pair.decode.forget_local_prefixes()
    answer = pair.proxy.ask(stage.prompts["lighthouse"], GENERATED_TOKENS, pair.decode)
    say(f"  decode: {answer.pulled} tokens pulled, and says {answer.text[:50]!r}")
    return answer


def ready(engine: Engine) -> None:
    """Waits for an engine and wakes it up with one unrelated request."""
    started_s = engine.wait_ready()
    warm = engine.ask(WARM_UP, 8)
    say(
        f"{engine.name}: ready after {started_s:.0f} s; unrelated warm-up request: "
        f"first token after {warm.first_token_s:.2f} s"
    )


def told(answer: Answer) -> str:
    """Where an answer's prompt tokens came from, and how soon."""
    tier = (
        f" from {'NVMe' if answer.from_nvme == answer.pulled else 'DRAM and NVMe'}"
        if answer.from_nvme
        else ""
    )
    origin = f"{answer.pulled} tokens pulled{tier}, {answer.computed} computed"
    return f"{origin}, first token after {answer.first_token_s:.2f} s"


def shown(command: list[str]) -> str:
    """A command as a user would type it."""
    return " ".join([Path(command[0]).name, *command[1:]])


def objects_of(prompt_tokens: int) -> int:
    """Objects that hold a prompt: its whole chunks, and a tail if whole engine blocks are left."""
    blocks_tokens = prompt_tokens // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
    return -(-blocks_tokens // CHUNK_TOKENS)


def committed(node: Node) -> int:
    """Objects that the node holds, ready to be read."""
    return int(node.gauge("kvstore_objects", tier="dram"))
