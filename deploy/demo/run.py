"""The main job on real parts: prefill pushes and dies, others pull and go on.

Act 1  an engine without a store: the outputs and times that everything is compared with
Act 2  a prefill engine pushes three prompts into a node and is SIGKILLed; a fresh pair of prefill and decode engines
       behind `kvstore proxy` pulls them
Act 3  the new prefill engine is SIGKILLed in the middle of a push; the proxy's client gets the right answer
Control  other KV under the right keys, with valid tables, must change the output: so it was really pulled
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that the file can be run by its path

from deploy.demo import acts  # noqa: E402
from deploy.demo.acts import ENGINE_BLOCK_TOKENS, GENERATED_TOKENS, PROMPT_TOKENS, Stage  # noqa: E402
from deploy.demo.engine import DemoFailed  # noqa: E402
from deploy.demo.node import Node  # noqa: E402
from deploy.demo.ports import free_port  # noqa: E402
from deploy.demo.report import Row, table, verdict  # noqa: E402

LONGER = ("lighthouse", "canal")
SPEED_UP_AIM = 3.0


def run(stage: Stage) -> int:
    """All acts; the exit code."""
    cold, local = acts.baseline(stage)
    node = Node(free_port(), free_port(), stage.logs, flags=acts.AS_BETWEEN_HOSTS)
    stage.exits.callback(node.stop)
    node.wait_ready()
    acts.push_and_die(stage, node)
    pair = acts.fresh_pair(stage, node)
    pulled, prefilled = acts.pull(stage, pair)
    survivor, left_behind = acts.killed_while_pushing(stage, node, pair)
    changed = acts.forged(stage, node, pair)

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
    print(
        f"\nTime to first token and origin of prompt tokens, {GENERATED_TOKENS} greedy tokens in fp32. `pulled in`\n"
        "is what a client of the proxy waits for, and so holds two pulls: prefill's, then decode's.\n"
    )
    print(table(rows))
    speed = min(row.speed_up for row in rows if row.prompt in LONGER)
    return verdict(
        [
            ("the output is identical to the engine without a store", all(row.identical for row in rows)),
            (
                f"prefill and decode each recomputed at most one engine block ({ENGINE_BLOCK_TOKENS} tokens)",
                all(0 < row.recomputed <= ENGINE_BLOCK_TOKENS for row in rows)
                and all(0 < computed <= ENGINE_BLOCK_TOKENS for computed in prefilled.values()),
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
            ("and its client's output is right all the same", survivor.text == cold["canal"].text),
            (
                "the proxy handed every prompt over, and went on with decode alone when prefill had died",
                pair.proxy.metric("kvstore_proxy_prefill_seconds_count") == len(PROMPT_TOKENS)
                and pair.proxy.metric("kvstore_proxy_fallbacks_total", reason="prefill_failed") == 1,
            ),
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
