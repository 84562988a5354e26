"""The whole application over HTTP, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngineFactory
from ray import serve

from configs.schema import (
    AdmissionConfig,
    AutoscalingConfig,
    BatchingConfig,
    BlockserveConfig,
    EngineConfig,
    ModelConfig,
    ReplicaResources,
)
from deployments.app import INGRESS_NAME, build_app, deployment_names

CHECKPOINT = Path(__file__).parent.parent / "golden" / "qwen3_dense_tied"


def model_config(**kwargs) -> ModelConfig:
    defaults = {
        "name": "fake/model:1",
        "path": str(CHECKPOINT),
        "engine": EngineConfig(max_num_seqs=16),
        "resources": ReplicaResources(num_cpus=0.1, graceful_shutdown_timeout_s=20),
    }
    return ModelConfig(**{**defaults, **kwargs})


@pytest.fixture(scope="module")
def app(serve_url: str) -> Iterator[str]:
    config = BlockserveConfig(
        models=(model_config(),),
        batching=BatchingConfig(batch_wait_timeout_s=0.05),
        admission=AdmissionConfig(max_live_requests=24),
    )
    serve.run(build_app(config, FakeEngineFactory(step_s=0.02)), name="http", route_prefix="/http")
    url = f"{serve_url}/http"
    wait_until_ready(url)
    yield url
    serve.delete("http")


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < deadline, httpx.get(f"{url}/ready").text
        time.sleep(0.2)


def body(**kwargs) -> dict:
    return {"model": "fake/model:1", "prompt": "a b", "max_tokens": 10, "ignore_eos": True, **kwargs}


def replica_stats(app_name: str):
    handle = serve.get_deployment_handle("Engine-fake-model-1", app_name)
    return [stats for _, stats in handle.broadcast("engine_stats").results(timeout_s=10)]


def live(app_name: str) -> int:
    return sum(stats.waiting + stats.running for stats in replica_stats(app_name))


def seconds_until_idle(app_name: str, limit: float) -> float:
    start = time.monotonic()
    while live(app_name):
        assert time.monotonic() - start < limit
        time.sleep(0.01)
    return time.monotonic() - start


async def test_sixteen_http_requests_are_seen_together_in_the_engine(app: str) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        responses = await asyncio.gather(
            *(client.post(f"{app}/v1/completions", json=body()) for _ in range(16))
        )
    assert [response.status_code for response in responses] == [200] * 16
    assert {response.json()["usage"]["completion_tokens"] for response in responses} == {10}
    (stats,) = await asyncio.to_thread(replica_stats, "http")
    assert stats.max_running_seen == 16


def test_a_disconnect_mid_stream_frees_the_engine(app: str) -> None:
    with httpx.stream("POST", f"{app}/v1/completions", json=body(max_tokens=900, stream=True)) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        assert live("http") == 1
    assert seconds_until_idle("http", 5) < 2  # alone it would run for 18 seconds


async def test_a_burst_gets_429_with_retry_after_and_the_accepted_end(app: str) -> None:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        requests = (client.post(f"{app}/v1/completions", json=body(max_tokens=50)) for _ in range(80))
        responses = await asyncio.gather(*requests)
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 24
    refused = next(response for response in responses if response.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"


def test_a_running_stream_ends_before_a_shutdown_does(serve_url: str) -> None:
    config = BlockserveConfig(models=(model_config(),))
    serve.run(build_app(config, FakeEngineFactory(step_s=0.05)), name="drain", route_prefix="/drain")
    wait_until_ready(f"{serve_url}/drain")
    with httpx.stream(
        "POST", f"{serve_url}/drain/v1/completions", json=body(max_tokens=80, stream=True), timeout=30
    ) as response:
        lines = response.iter_lines()
        next(lines)
        serve.delete("drain", _blocking=False)
        events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event[6:])["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    deadline = time.monotonic() + 30
    while "drain" in serve.status().applications:
        assert time.monotonic() < deadline
        time.sleep(0.2)


async def test_a_second_replica_comes_under_load_and_goes_again(serve_url: str) -> None:
    scaling = AutoscalingConfig(
        min_replicas=1, max_replicas=2, upscale_delay_s=0.5, downscale_delay_s=2, look_back_period_s=1
    )
    config = BlockserveConfig(
        models=(model_config(engine=EngineConfig(max_num_seqs=4), autoscaling=scaling),)
    )
    serve_app = build_app(config, FakeEngineFactory(step_s=0.05))
    await asyncio.to_thread(serve.run, serve_app, name="scale", route_prefix="/scale")
    url = f"{serve_url}/scale"
    await asyncio.to_thread(wait_until_ready, url)
    try:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=100)) as client:
            scaled = asyncio.Event()

            async def user() -> set[int]:
                statuses = set()
                while not scaled.is_set():
                    response = await client.post(f"{url}/v1/completions", json=body(max_tokens=20))
                    statuses.add(response.status_code)
                return statuses

            users = [asyncio.create_task(user()) for _ in range(12)]
            start = time.monotonic()
            while len(await asyncio.to_thread(replica_stats, "scale")) < 2:
                assert time.monotonic() - start < 60
                await asyncio.sleep(0.2)
            await asyncio.sleep(3)  # the load goes on, and finds the second replica
            stats = await asyncio.to_thread(replica_stats, "scale")
            scaled.set()
            assert set().union(*await asyncio.gather(*users)) == {200}
        assert min(one.max_running_seen for one in stats) >= 1
        start = time.monotonic()
        while len(await asyncio.to_thread(replica_stats, "scale")) > 1:
            assert time.monotonic() - start < 60
            await asyncio.sleep(0.5)
    finally:
        await asyncio.to_thread(serve.delete, "scale")


def test_deployment_names_are_valid_and_unique() -> None:
    config = BlockserveConfig(
        models=tuple(ModelConfig(name=name, path="x") for name in ("org/m.1", "org-m.1", "a_b", INGRESS_NAME))
    )
    assert deployment_names(config) == ["Engine-org-m.1", "Engine-org-m.1-2", "Engine-a-b", "Engine-Ingress"]
