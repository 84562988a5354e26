"""Real vLLM on golden checkpoints; every test is skipped by name where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_client import LLADA2, QWEN, Client, start

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed"))


@pytest.fixture(scope="module")
def qwen() -> Iterator[Client]:
    client = start(QWEN)
    yield client
    client.close()


@pytest.fixture(scope="module")
def llada2() -> Iterator[Client]:
    client = start(LLADA2)
    yield client
    client.close()
