"""One server for all end-to-end tests that do not need one of their own, on each backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import GOLDEN, NEEDS_VLLM, Server, engine, serve


@pytest.fixture(scope="session", params=["torch", pytest.param("vllm", marks=NEEDS_VLLM)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["torch", pytest.param("vllm", marks=[NEEDS_VLLM, pytest.mark.slow])])
def own_backend(request: pytest.FixtureRequest) -> str:
    """For tests that start servers of their own, which takes vLLM a minute each."""
    return request.param


@pytest.fixture(scope="session")
def server(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One autoregressive and two block-diffusion models, as clients of one application see them."""
    config = {
        "models": [
            {
                "name": "qwen",
                "path": str(GOLDEN / "qwen3_dense_untied"),
                "engine": engine(backend, max_num_seqs=16),
            },
            {"name": "llada", "path": str(GOLDEN / "llada2_b32"), "engine": engine(backend)},
            {"name": "words", "path": "demo://llada2-words", "engine": engine(backend)},
        ],
    }
    with serve(config, tmp_path_factory.mktemp("server")) as running:
        yield running
