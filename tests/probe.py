"""A deployment that runs a test's code where the ingress' code runs: beside a ``BatchingDispatcher``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fake_engine import FakeEngineFactory
from ray import serve

from configs.schema import AutoscalingConfig, BatchingConfig, BlockserveConfig, EngineConfig, ModelConfig
from configs.schema import ReplicaResources as Resources
from deployments.app import _engine_deployment
from deployments.batching import BatchingDispatcher
from replicas.protocol import GenerationRequest, RequestOutput, SamplingParams


class Probe:
    def __init__(self, config: BlockserveConfig, handles: dict[str, Any]) -> None:
        self.dispatcher = BatchingDispatcher(config, handles)
        self.started = False

    async def call(self, scenario: Callable[[BatchingDispatcher], Awaitable[Any]]) -> Any:
        if not self.started:
            self.started = True
            self.dispatcher.start()
        return await scenario(self.dispatcher)


def fake_config(
    *, replicas: int = 1, max_num_seqs: int = 8, autoscaling: AutoscalingConfig | None = None, **batching: Any
) -> BlockserveConfig:
    model = ModelConfig(
        name="fake",
        path="unused",
        engine=EngineConfig(max_num_seqs=max_num_seqs),
        autoscaling=autoscaling or AutoscalingConfig(min_replicas=replicas, max_replicas=replicas),
        resources=Resources(num_cpus=0.1, health_check_period_s=1, graceful_shutdown_timeout_s=2),
    )
    return BlockserveConfig(models=(model,), batching=BatchingConfig(**batching))


@contextmanager
def probe_app(name: str, config: BlockserveConfig, **engine: Any) -> Iterator[Callable[..., Any]]:
    """Deploys probe and fake replicas; yields ``run(scenario, timeout_s=30)``, which returns its result."""
    model = config.models[0]
    engine_app = _engine_deployment(model, "Engine").bind(model, FakeEngineFactory(**engine))
    deployment = serve.deployment(Probe).options(
        name="Probe", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1}
    )
    handle = serve.run(deployment.bind(config, {model.name: engine_app}), name=name, route_prefix=f"/{name}")

    def run(scenario: Callable[[BatchingDispatcher], Awaitable[Any]], timeout_s: float = 30) -> Any:
        return handle.call.remote(scenario).result(timeout_s=timeout_s)

    try:
        yield run
    finally:
        serve.delete(name)


def request(
    request_id: str, *prompt: int, max_tokens: int = 10, deadline: float | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id, "fake", prompt or (1,), SamplingParams(max_tokens=max_tokens), deadline=deadline
    )


async def collect(dispatcher: BatchingDispatcher, one: GenerationRequest) -> RequestOutput:
    """All of a request's outputs as one: every token, the last finish reason and error."""
    merged = RequestOutput(one.request_id)
    async for output in dispatcher.stream(one):
        merged.new_token_ids = merged.new_token_ids + output.new_token_ids
        merged.finish_reason, merged.error = output.finish_reason, output.error
    return merged


async def collect_all(
    dispatcher: BatchingDispatcher, requests: list[GenerationRequest]
) -> list[RequestOutput]:
    return await asyncio.gather(*(collect(dispatcher, one) for one in requests))


async def live_at_most(dispatcher: BatchingDispatcher, most: int, seconds: float) -> float:
    """Seconds until the replicas, asked directly, have at most ``most`` live requests."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        answers = await dispatcher._handles["fake"].broadcast("engine_stats").results_async(timeout_s=5)
        live = sum(stats.waiting + stats.running for _, stats in answers)
        if live <= most:
            return loop.time() - start
        assert loop.time() - start < seconds, f"{live} requests are still live"
        await asyncio.sleep(0.01)


async def idle_within(dispatcher: BatchingDispatcher, seconds: float) -> float:
    return await live_at_most(dispatcher, 0, seconds)
