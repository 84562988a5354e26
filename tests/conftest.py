"""What several test folders share: a local Ray cluster, and the fake engine on the import path."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from local_ports import ROOT, free_port

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
    from ray import serve

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
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
