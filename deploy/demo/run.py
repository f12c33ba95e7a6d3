"""The main job on real parts: prefill pushes and dies, decode pulls and goes on.

Act 1  an engine without a store: the outputs and times that everything is compared with
Act 2  a prefill engine pushes three prompts into a node and is SIGKILLed; a fresh decode engine pulls them
Act 3  another prefill engine is SIGKILLed in the middle of its push; decode is still right
Control  other KV under the right keys, with valid tables, must change the output: so it was really pulled
"""

import argparse
import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that the file can be run by its path

from deploy.demo.engine import Answer, DemoFailed, Engine  # noqa: E402
from deploy.demo.forge import forge_all  # noqa: E402
from deploy.demo.node import Node  # noqa: E402
from deploy.demo.ports import free_port  # noqa: E402
from deploy.demo.report import Row, say, table, verdict  # noqa: E402

PROMPT_TOKENS = {"tides": 639, "lighthouse": 1_919, "canal": 3_583}
LONGER = ("lighthouse", "canal")
GENERATED_TOKENS = 64
ENGINE_BLOCK_TOKENS = 128  # vLLM's block size on CPU
CHUNK_TOKENS = 256
SPEED_UP_AIM = 3.0
WARM_UP = "This request is unrelated to the others; it only wakes the engine up."
PUSH_S_MAX = 60.0


@dataclass
class Stage:
    """What the acts share."""

    model: Path
    logs: Path
    exits: contextlib.ExitStack
    prompts: dict[str, str]

    def engine(self, name: str, store: str | None) -> Engine:
        """Starts an engine that ends with the demo at the latest."""
        engine = Engine(name, self.model, free_port(), self.logs, store=store)
        self.exits.callback(engine.stop)
        return engine


def ready(engine: Engine) -> None:
    """Waits for an engine and wakes it up with one unrelated request."""
    started_s = engine.wait_ready()
    warm = engine.ask(WARM_UP, 8)
    say(
        f"{engine.name}: ready after {started_s:.0f} s; unrelated warm-up request: "
        f"first token after {warm.first_token_s:.2f} s"
    )


def baseline(stage: Stage) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """Act 1: every prompt cold, then again as a hit of the engine's own prefix cache."""
    say("Act 1: an engine without a store computes everything")
    engine = stage.engine("baseline", None)
    ready(engine)
    cold, local = {}, {}
    for name, prompt in stage.prompts.items():
        cold[name] = engine.ask(prompt, GENERATED_TOKENS)
        local[name] = engine.ask(prompt, GENERATED_TOKENS)
        if cold[name].prompt_tokens != PROMPT_TOKENS[name]:
            raise DemoFailed(f"{name} has {cold[name].prompt_tokens} tokens, not {PROMPT_TOKENS[name]}")
        say(
            f"  {name}: {cold[name].prompt_tokens} tokens, first token after {cold[name].first_token_s:.2f} s cold"
        )
    engine.stop()
    return cold, local


def push_and_die(stage: Stage, node: Node) -> dict[str, dict[str, Any]]:
    """Act 2, first half: a prefill engine pushes the prompts and is killed; what it handed off."""
    say("Act 2: a prefill engine pushes into the store ...")
    prefill = stage.engine("prefill", node.transfer_config)
    say(f"  $ {' '.join(Path(word).name if n == 0 else word for n, word in enumerate(prefill.command))}")
    ready(prefill)
    hand_offs = {name: prefill.prefill(prompt) for name, prompt in stage.prompts.items()}
    expected = sum(objects_of(tokens) for tokens in PROMPT_TOKENS.values())
    deadline = time.monotonic() + PUSH_S_MAX
    while committed(node) < expected:
        if time.monotonic() > deadline:
            raise DemoFailed(f"{committed(node)} of {expected} objects were committed", prefill.log_path)
        time.sleep(0.05)
    prefill.kill()
    stored = node.gauge("kvstore_object_bytes", tier="dram")
    say(f"  ... {expected} objects ({stored / 1e6:.0f} MB) are committed; prefill is SIGKILLed and gone")
    return hand_offs


def pull(stage: Stage, decode: Engine, hand_offs: dict[str, dict[str, Any]]) -> dict[str, Answer]:
    """Act 2, second half: a decode engine that never saw the prompts gets them with the hand-off."""
    answers = {}
    for name, prompt in stage.prompts.items():
        answers[name] = answer = decode.ask(prompt, GENERATED_TOKENS, hand_off=hand_offs[name])
        say(f"  {name}: {told(answer)}")
    return answers


def killed_while_pushing(stage: Stage, node: Node, prefill: Engine, decode: Engine) -> tuple[Answer, int]:
    """Act 3: the answer of decode, and how many reservations the killed engine left behind."""
    say("Act 3: another prefill engine is SIGKILLed in the middle of its push")
    salt = "act three"  # the same prompt under keys of its own, so that nothing of it is stored yet
    sender = prefill.start_prefill(stage.prompts["canal"], salt)
    stage.exits.callback(sender.kill)
    left_behind = stop_while_pushing(node, prefill)
    prefill.kill()
    sender.kill()
    say(f"  prefill died with {left_behind} objects half written")
    answer = decode.ask(stage.prompts["canal"], GENERATED_TOKENS, salt=salt)
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


def forged(stage: Stage, node: Node, decode: Engine, hand_off: dict[str, Any]) -> Answer:
    """The negative control: the answer of decode when the store holds other KV under the same keys."""
    count = forge_all(node)
    say(f"Control: {count} objects replaced by other KV under the same keys, with valid tables")
    decode.forget_local_prefixes()
    answer = decode.ask(stage.prompts["lighthouse"], GENERATED_TOKENS, hand_off=hand_off)
    say(f"  decode: {answer.pulled} tokens pulled, and says {answer.text[:50]!r}")
    return answer


def told(answer: Answer) -> str:
    """Where an answer's prompt tokens came from, and how soon."""
    origin = f"{answer.pulled} tokens pulled, {answer.computed} computed"
    return f"{origin}, first token after {answer.first_token_s:.2f} s"


def objects_of(prompt_tokens: int) -> int:
    """Objects that hold a prompt: its whole chunks, and a tail if whole engine blocks are left."""
    blocks_tokens = prompt_tokens // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
    return -(-blocks_tokens // CHUNK_TOKENS)


def committed(node: Node) -> int:
    """Objects that the node holds, ready to be read."""
    return int(node.gauge("kvstore_objects", tier="dram"))


def run(stage: Stage) -> int:
    """All acts; the exit code."""
    cold, local = baseline(stage)
    node = Node(free_port(), free_port(), stage.logs)
    stage.exits.callback(node.stop)
    node.wait_ready()
    hand_offs = push_and_die(stage, node)
    say("  a fresh decode engine starts (and the prefill engine of act 3 beside it)")
    decode = stage.engine("decode", node.transfer_config)
    prefill = stage.engine("prefill-2", node.transfer_config)
    ready(decode)
    ready(prefill)
    pulled = pull(stage, decode, hand_offs)
    survivor, left_behind = killed_while_pushing(stage, node, prefill, decode)
    changed = forged(stage, node, decode, hand_offs["lighthouse"])

    rows = [
        Row(
            prompt=name,
            prompt_tokens=tokens,
            pulled=pulled[name].pulled,
            recomputed=tokens - pulled[name].pulled,
            cold_s=cold[name].first_token_s,
            pulled_s=pulled[name].first_token_s,
            local_s=local[name].first_token_s,
            identical=pulled[name].text == cold[name].text,
        )
        for name, tokens in PROMPT_TOKENS.items()
    ]
    print(f"\nTime to first token and origin of prompt tokens, {GENERATED_TOKENS} greedy tokens in fp32:\n")
    print(table(rows))
    speed = min(row.speed_up for row in rows if row.prompt in LONGER)
    return verdict(
        [
            (
                "decode's output is identical to the engine without a store",
                all(row.identical for row in rows),
            ),
            (
                f"at most one engine block ({ENGINE_BLOCK_TOKENS} tokens) of each prompt was recomputed",
                all(0 < row.recomputed <= ENGINE_BLOCK_TOKENS for row in rows),
            ),
            (
                "tokens pulled and computed add up to the prompt, by vLLM's own counters",
                all(
                    a.pulled + a.computed + a.local == a.prompt_tokens and a.local == 0
                    for a in pulled.values()
                ),
            ),
            (
                f"pulled is at least {SPEED_UP_AIM:.0f} x faster than cold on the longer prompts ({speed:.1f} x)",
                speed >= SPEED_UP_AIM,
            ),
            (f"prefill was killed while pushing ({left_behind} reservations open)", left_behind > 0),
            ("decode's output is right after a push that was cut off", survivor.text == cold["canal"].text),
            ("other KV under the same keys was pulled, too", changed.pulled == pulled["lighthouse"].pulled),
            (
                "and changes the output: what decode says comes from what it pulled",
                changed.text != cold["lighthouse"].text,
            ),
        ]
    )


def main() -> int:
    """Runs the demo.

    Returns:
        0 if everything it shows is true, else 1.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct", help="model folder"
    )
    parser.add_argument(
        "--logs", type=Path, default=ROOT / ".cache/demo", help="folder for the processes' logs"
    )
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    prompts = {
        name: (Path(__file__).parent / "prompts" / f"{name}.txt").read_text() for name in PROMPT_TOKENS
    }
    began = time.monotonic()
    with contextlib.ExitStack() as exits:
        try:
            code = run(Stage(arguments.model, arguments.logs, exits, prompts))
        except DemoFailed as failure:
            print(f"\nThe demo failed: {failure}", file=sys.stderr)
            if failure.log_path is not None:
                print(f"The end of {failure.log_path}:", file=sys.stderr)
                print(
                    "\n".join(failure.log_path.read_text(errors="replace").splitlines()[-25:]),
                    file=sys.stderr,
                )
            return 1
    print(f"Took {time.monotonic() - began:.0f} s. Logs of all processes: {arguments.logs}")
    return code


if __name__ == "__main__":
    sys.exit(main())
