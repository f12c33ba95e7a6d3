"""Fixtures of the connector's tests."""

import logging

import pytest


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """`caplog`, also for lines that go to vLLM's log, which may keep them from the root logger."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog
