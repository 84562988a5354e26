"""Servers and marks of the conformance tests; the fixture ``server`` is the one that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import Server, engine, serve
from tool_model import NotReachableError, make_tool_model

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On vLLM all of this is slow."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if FOLDER in item.path.parents and callspec and callspec.params.get("backend") == "vllm":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint whose chat template knows tools."""
    try:
        return make_tool_model(tmp_path_factory.mktemp("tool_model"))
    except NotReachableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def chat_server(backend: str, tool_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Models with real chat templates: `tools` (Qwen3, random weights) and `smollm2`; and `words`, block diffusion."""
    small = {"num_cpus": 0.2}
    config = {
        "ingress": {"num_cpus": 0},
        "models": [
            {"name": "tools", "path": str(tool_model), "engine": engine(backend), "resources": small},
            {
                "name": "smollm2",
                "path": "demo://smollm2-135m-instruct",
                "engine": engine(backend, max_model_len=2048, max_num_batched_tokens=256),
                "resources": small,
            },
            {
                "name": "words",
                "path": "demo://llada2-words",
                "engine": engine(backend),
                "resources": small,
            },
        ],
    }
    with serve(config, tmp_path_factory.mktemp("chat_server")) as running:
        yield running
