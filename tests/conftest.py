"""What several test folders share: a local Ray cluster, and a real server on each backend."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from local_ports import ROOT, free_port
from running_server import GOLDEN, NEEDS_VLLM, Server, engine, serve

CLUSTER_ENV = {
    # On a busy machine the default of 5 s replaces a proxy that is only slow to start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
}


@pytest.fixture(scope="session")
def serve_url() -> Iterator[str]:
    """A Ray cluster of this test session with Serve's proxy on a free port; its base URL.

    The CPUs are logical: replicas of the fake engine mostly sleep.
    """
    import ray
    from ray import serve as ray_serve

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bs-ray-", ignore_cleanup_errors=True) as temp_dir:
        ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=temp_dir,
            object_store_memory=200 * 1024 * 1024,
            runtime_env={"env_vars": CLUSTER_ENV},
        )
        try:
            ray_serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            ray_serve.shutdown()
            ray.shutdown()


@pytest.fixture(scope="session", params=["torch", pytest.param("vllm", marks=NEEDS_VLLM)])
def backend(request: pytest.FixtureRequest) -> str:
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
