"""The main job on real parts: prefill pushes and dies, others pull and go on.

Act 1  an engine without a store: the outputs and times that everything is compared with
Act 2  a prefill engine pushes three prompts into a node and is SIGKILLed; a fresh pair of prefill and decode engines
       behind `kvstore proxy` pulls them
Act 3  the new prefill engine is SIGKILLed in the middle of a push; the proxy's client gets the right answer
Act 4  the node is restarted: its DRAM is empty, and decode pulls from NVMe
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
from deploy.demo.engine import Answer, DemoFailed  # noqa: E402
from deploy.demo.ports import free_port  # noqa: E402
from deploy.demo.report import Row, table, verdict  # noqa: E402

LONGER = ("lighthouse", "canal")
SPEED_UP_AIM = 2.0  # of what is pulled twice, by prefill and by decode


def run(stage: Stage) -> int:
    """All acts; the exit code."""
    cold, local = acts.baseline(stage)
    node = acts.start_node(stage, "kvstore", (free_port(), free_port()))
    acts.push_and_die(stage, node)
    pair = acts.fresh_pair(stage, node)
    pulled, prefilled = acts.pull(stage, pair)
    survivor, left_behind = acts.killed_while_pushing(stage, node, pair)
    handed_over = (
        pair.proxy.metric("kvstore_proxy_prefill_seconds_count") == len(PROMPT_TOKENS)
        and pair.proxy.metric("kvstore_proxy_fallbacks_total", reason="prefill_failed") == 1
    )
    again, on_disk, warm = acts.restarted(stage, node, pair)
    changed = acts.forged(stage, again, pair)

    from_dram = [Row(name, cold[name], local[name], pulled[name]) for name in PROMPT_TOKENS]
    from_nvme = [Row(name, cold[name], local[name], warm[name]) for name in PROMPT_TOKENS]
    rows = from_dram + from_nvme
    print(
        f"\nTime to first token and origin of prompt tokens, {GENERATED_TOKENS} greedy tokens in fp32. `pulled in`"
    )
    print(
        "is what a client of the proxy waits for; in the upper half it holds two pulls, prefill's and decode's.\n"
    )
    print(table(rows))
    speed = min(row.speed_up for row in rows if row.prompt in LONGER)
    computed = [row.recomputed for row in rows] + list(prefilled.values())
    return verdict(
        [
            (
                "all outputs are identical to those of the engine without a store",
                all(r.identical for r in rows),
            ),
            (
                f"prefill and decode each recomputed at most one engine block ({ENGINE_BLOCK_TOKENS} tokens)",
                all(0 < tokens <= ENGINE_BLOCK_TOKENS for tokens in computed),
            ),
            (
                "tokens pulled and computed add up to the prompt, by vLLM's own counters",
                all(adds_up(row.pulled) for row in rows),
            ),
            (
                f"pulled is at least {SPEED_UP_AIM:.0f} x faster than cold on the longer prompts ({speed:.1f} x)",
                speed >= SPEED_UP_AIM,
            ),
            (f"prefill was killed while pushing ({left_behind} reservations open)", left_behind > 0),
            ("and its client's output is right all the same", survivor.text == cold["canal"].text),
            (
                "the proxy handed every prompt over, and went on with decode alone when prefill died",
                handed_over,
            ),
            (
                f"the node came back with nothing in memory and {on_disk} objects on NVMe, and hits came from there",
                on_disk > 0 and all(row.from_dram == 0 < row.pulled.from_nvme for row in from_nvme),
            ),
            ("other KV under the same keys was pulled, too", changed.pulled == pulled["lighthouse"].pulled),
            (
                "and changes the output: what decode says comes from what it pulled",
                changed.text != cold["lighthouse"].text,
            ),
        ]
    )


def adds_up(answer: Answer) -> bool:
    """Whether every token of the prompt was pulled or computed, and none was in the engine."""
    return answer.pulled + answer.computed == answer.prompt_tokens and answer.local == 0


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
    acts.remove_device(arguments.logs)
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
