"""Real engines whose models keep several kinds of KV push, hit and pull; `make test-hybrid` plays more of it.

The checks are in `tests.hybrid.player`: tokens and logprobs are those of a hit of the engine's own prefix cache,
zeros in any one kind change the answer.
"""

from pathlib import Path

import pytest

from tests.hybrid.stage import Turn, play_all

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("model", ["gemma3", "gpt-oss", "qwen3-next"])
def test_a_model_of_several_kinds_is_pulled_as_it_was_pushed(model: str, tmp_path: Path) -> None:
    assert play_all([model], tmp_path, {"alone": [Turn("write,zero")]}) == 0
