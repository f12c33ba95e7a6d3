"""What the halves are given when vLLM makes them."""

from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

from connector.config import Config
from connector.start import start_scheduler_half


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_an_engine_of_one_worker_does_with_seals(world_size: int) -> None:
    """Mutant: ranks that read parts get seals, which prove no part; they would load nothing."""
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=world_size))
    with patch("connector.start.Background") as control, patch("connector.start.SchedulerHalf"):
        start_scheduler_half(vllm_config, None, Config(), Mock())
    assert control.call_args.args[0].whole_objects is (world_size == 1)
