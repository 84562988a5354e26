"""The policy in a real Serve controller, on a deployment that reports its logical queue depth."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from ray import serve
from ray.serve.config import AutoscalingPolicy

from configs.schema import AutoscalingConfig, EngineConfig, ModelConfig
from deployments.app import _num_replicas


def batch_worker(policy: str | None = None, **bounds: Any) -> serve.Deployment:
    """A deployment, scaled as engines are, of which one call stands for a batch of requests; eight of them fill
    a replica. ``policy`` is another policy's import path."""

    class BatchWorker:
        def __init__(self) -> None:
            self.running = 0

        async def work(self, requests: int, seconds: float) -> int:
            self.running += requests
            await asyncio.sleep(seconds)
            self.running -= requests
            return requests

        def record_autoscaling_stats(self) -> dict[str, float]:
            return {"waiting": max(self.running - 8.0, 0.0), "running": min(self.running, 8.0)}

    scaling = AutoscalingConfig(upscale_delay_s=1, downscale_delay_s=2, **bounds)
    model = ModelConfig(name="m", path="m", engine=EngineConfig(max_num_seqs=8), autoscaling=scaling)
    options = _num_replicas(model)
    if policy is not None:
        changed = AutoscalingPolicy(policy_function=policy, policy_kwargs={"target": 8})
        options["autoscaling_config"] = options["autoscaling_config"].model_copy(update={"policy": changed})
    return serve.deployment(BatchWorker).options(
        **options,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.5},
        graceful_shutdown_wait_loop_s=0.2,
    )


def replicas(app: str, *states: str) -> int:
    (status,) = serve.status().applications[app].deployments.values()
    return sum(status.replica_states.get(state, 0) for state in states or ("RUNNING",))


def wait_for_replicas(app: str, number: int, *states: str, timeout_s: float) -> None:
    started = time.monotonic()
    while (seen := replicas(app, *states)) != number:
        waited = time.monotonic() - started
        assert waited < timeout_s, f"{seen} replicas after {waited:.0f} s, expected {number}"
        time.sleep(0.2)


@pytest.fixture
def app(request: pytest.FixtureRequest, serve_url: str):
    name = request.node.name
    yield name
    serve.delete(name)


def test_a_batch_scales_up_and_its_end_down(app: str) -> None:
    handle = serve.run(batch_worker(min_replicas=1, max_replicas=2).bind(), name=app, route_prefix=None)
    # To Serve this is one request; one replica would do.
    answer = handle.work.remote(16, 20)
    wait_for_replicas(app, 2, "STARTING", "RUNNING", timeout_s=10)
    wait_for_replicas(app, 2, timeout_s=60)
    assert answer.result(timeout_s=60) == 16
    wait_for_replicas(app, 1, timeout_s=20)
    time.sleep(3)
    assert replicas(app) == 1


def test_from_zero_and_back(app: str) -> None:
    handle = serve.run(batch_worker(min_replicas=0, max_replicas=2).bind(), name=app, route_prefix=None)
    assert replicas(app) == 0
    assert handle.work.remote(3, 0.5).result(timeout_s=60) == 3
    wait_for_replicas(app, 0, timeout_s=30)


def test_an_error_in_the_rule_stalls_no_application(app: str) -> None:
    broken = batch_worker(
        "broken_policy:BrokenPolicy", min_replicas=1, max_replicas=3, initial_replicas=2
    ).bind()
    handle = serve.run(broken, name=app, route_prefix=None)
    other = f"{app}-other"
    try:
        second = serve.run(batch_worker(min_replicas=1, max_replicas=1).bind(), name=other, route_prefix=None)
        assert handle.work.remote(30, 0).result(timeout_s=30) == 30
        assert second.work.remote(1, 0).result(timeout_s=30) == 1
        wait_for_replicas(app, 2, timeout_s=30)
    finally:
        serve.delete(other)
