"""Backends of servers that a test starts for itself."""

from __future__ import annotations

import pytest
from running_server import NEEDS_VLLM


@pytest.fixture(params=["torch", pytest.param("vllm", marks=[NEEDS_VLLM, pytest.mark.slow])])
def own_backend(request: pytest.FixtureRequest) -> str:
    """For tests that start servers of their own, which takes vLLM a minute each."""
    return request.param
