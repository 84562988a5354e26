"""One server for all end-to-end tests that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import GOLDEN, Server, serve


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One autoregressive and two block-diffusion models, as clients of one application see them."""
    config = {
        "models": [
            {
                "name": "qwen",
                "path": str(GOLDEN / "qwen3_dense_tied"),
                "engine": {"dtype": "float32", "max_num_seqs": 16},
            },
            {
                "name": "llada",
                "path": str(GOLDEN / "llada2_b32"),
                "engine": {"dtype": "float32", "max_num_seqs": 8},
            },
            {
                "name": "words",
                "path": "demo://llada2-words",
                "engine": {"dtype": "float32", "max_num_seqs": 8},
            },
        ],
    }
    with serve(config, tmp_path_factory.mktemp("server")) as running:
        yield running
