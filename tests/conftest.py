"""Fixtures that many rooms share, Hypothesis profiles, and the order of tests: cheap first, real vLLM last."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import RedisServer

# No deadlines per example: the machine is shared, and a slow example is not a wrong one.
dev = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", dev)
settings.register_profile("ci", dev, max_examples=100, derandomize=True, print_blob=True)
settings.register_profile("night", dev, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers
os.environ["VLLM_NO_USAGE_STATS"] = "1"

REPOSITORY = Path(__file__).parent.parent
MODEL = REPOSITORY / ".cache/models/SmolLM2-135M-Instruct"
TIMEOUT_S = {"e2e": 900, "process": 180}  # instead of the 60 s of pyproject.toml


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first; time for those that start processes."""
    order = list(reversed(TIMEOUT_S))
    for item in items:
        for name, timeout_s in TIMEOUT_S.items():
            if item.get_closest_marker(name) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(timeout_s))
                break
    items.sort(
        key=lambda item: max(
            (order.index(m.name) + 1 for m in item.iter_markers() if m.name in order), default=0
        )
    )


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct as a local folder, float32."""
    assert (MODEL / ".ready").exists(), "the test model is missing: run `make setup`"
    return MODEL


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis for the whole run. A test that kills or pauses one starts its own `RedisServer`."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The address of an empty Redis."""
    redis_server.flush()
    return redis_server.url
