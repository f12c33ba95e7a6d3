"""Real vLLM engines and a real node: what `make demo` shows, in two engine starts.

The same prompt under a cache salt of its own has other keys, so one engine gives both the answer that it
computed and the answer that it pulled. A store that always misses fails at `pulled`; bytes that do not
matter fail at the forged objects.
"""

import contextlib
from pathlib import Path

import pytest

from deploy.demo.engine import Answer, Engine
from deploy.demo.forge import forge_all
from deploy.demo.node import Node
from tests.e2e.support import transfer_config
from tests.support import free_port, wait_until

GENERATED_TOKENS = 24
PROMPT_TOKENS, WHOLE_CHUNK_TOKENS, OBJECTS = 1_919, 1_792, 7


@pytest.mark.e2e
def test_decode_says_the_same_whatever_becomes_of_prefill_and_store(
    model_path: Path, repository: Path, tmp_path: Path
) -> None:
    prompt = (repository / "deploy/demo/prompts/lighthouse.txt").read_text()
    with contextlib.ExitStack() as exits:
        node = Node(free_port(), free_port(), tmp_path)
        exits.callback(node.stop)
        node.wait_ready()
        prefill, decode = (
            Engine(name, model_path, free_port(), tmp_path, store=transfer_config(node.control))
            for name in ("prefill", "decode")
        )
        exits.callback(prefill.stop)
        exits.callback(decode.stop)
        prefill.wait_ready()
        hand_off = prefill.prefill(prompt)
        wait_until(
            lambda: node.gauge("kvstore_objects", tier="dram") == OBJECTS, 60, "all objects to be committed"
        )
        prefill.kill()

        decode.wait_ready()
        computed = decode.ask(prompt, GENERATED_TOKENS, salt="computed here")
        assert origin(computed) == (PROMPT_TOKENS, 0, 0)
        pulled = decode.ask(prompt, GENERATED_TOKENS, hand_off=hand_off)
        assert origin(pulled) == (PROMPT_TOKENS - WHOLE_CHUNK_TOKENS, WHOLE_CHUNK_TOKENS, 0)
        assert pulled.text == computed.text

        decode.forget_local_prefixes()
        assert forge_all(node) >= OBJECTS
        forged = decode.ask(prompt, GENERATED_TOKENS, hand_off=hand_off)
        assert forged.pulled == WHOLE_CHUNK_TOKENS
        assert forged.text != computed.text, "what was pulled does not matter to the answer"

        decode.forget_local_prefixes()
        node.kill()
        alone = decode.ask(prompt, GENERATED_TOKENS, hand_off=hand_off)
        assert origin(alone) == (PROMPT_TOKENS, 0, 0)
        assert alone.text == computed.text


def origin(answer: Answer) -> tuple[int, int, int]:
    """Prompt tokens by where their KV came from: computed, pulled, already in the engine."""
    return answer.computed, answer.pulled, answer.local
