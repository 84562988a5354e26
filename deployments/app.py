"""``build(config)``: one ingress and one engine deployment per model, as a Serve application.

No ``from __future__ import annotations`` here: Serve reads the annotation of ``build``'s parameter to turn
the YAML's ``args`` into a ``BlockserveConfig``.
"""

import asyncio
import logging
import warnings
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig

from configs.schema import BlockserveConfig, ModelConfig
from deployments.batching import BatchingDispatcher
from deployments.ingress import create_app
from deployments.naming import INGRESS_NAME, deployment_names
from deployments.openai.api_keys import load_api_keys
from deployments.openai.contracts import ModelEntry, load_model_entry
from replicas.checkpoints import resolve_checkpoint
from replicas.replica import EngineReplica, Loader, load_engine

logger = logging.getLogger("ray.serve")

#: Serve counts RPCs, of which a batch is one and an abort another; the limits that matter are the
#: admission's, in logical requests, so these only have to be out of the way.
MAX_ONGOING_REQUESTS = 10_000
ROUTING_STATS_PERIOD_S = 1.0
#: Between two reports of a replica's queue depth to the controller.
METRICS_INTERVAL_S = 1.0
MAX_LOAD_ATTEMPTS = 3
LOAD_RETRY_DELAY_S = 5.0


def build(args: BlockserveConfig) -> serve.Application:
    """What ``import_path: deployments.app:build`` names in a Serve YAML file."""
    return build_app(args)


def build_app(config: BlockserveConfig, load: Loader = load_engine) -> serve.Application:
    """The application; ``load`` makes a replica's engine."""
    handles = {
        model.name: _engine_deployment(model, name).bind(model, load)
        for model, name in zip(config.models, deployment_names(config), strict=True)
    }
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name=INGRESS_NAME,
        num_replicas=config.ingress.num_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        health_check_period_s=5,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=max(
            model.resources.graceful_shutdown_timeout_s for model in config.models
        ),
    )
    return ingress.bind(config, handles)


def _engine_deployment(model: ModelConfig, name: str) -> serve.Deployment:
    resources = model.resources
    return serve.deployment(EngineReplica).options(
        name=name,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_constructor_retry_count=MAX_LOAD_ATTEMPTS,
        logging_config={"enable_access_log": False},  # a line for every poll of its load, every second
        **_placement(model),
        health_check_period_s=resources.health_check_period_s,
        health_check_timeout_s=resources.health_check_timeout_s,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=resources.graceful_shutdown_timeout_s,
        request_router_config=RequestRouterConfig(
            request_router_class="router.request_router:RequestRouter",
            request_routing_stats_period_s=ROUTING_STATS_PERIOD_S,
        ),
        **_num_replicas(model),
    )


def _placement(model: ModelConfig) -> dict[str, Any]:
    """Tensor-parallel ranks get a bundle each, side by side if they can be; the first is the replica's own."""
    amounts = {"CPU": model.resources.num_cpus, "GPU": model.resources.num_gpus}
    options = {"ray_actor_options": {"num_cpus": amounts["CPU"], "num_gpus": amounts["GPU"]}}
    size = model.engine.tensor_parallel_size
    if size == 1:
        return options
    bundle = {name: amount for name, amount in amounts.items() if amount}
    if model.engine.backend == "vllm":
        # vLLM's executor puts a worker of its own on the GPU of every bundle, the first among them.
        options["ray_actor_options"]["num_gpus"] = 0
    return options | {
        "placement_group_bundles": [dict(bundle) for _ in range(size)],
        "placement_group_strategy": "PACK",
    }


def _num_replicas(model: ModelConfig) -> dict[str, Any]:
    scaling = model.autoscaling
    if scaling.min_replicas == scaling.max_replicas:
        return {"num_replicas": scaling.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="deployments.autoscaling:QueueDepthPolicy",
        policy_kwargs={"target": scaling.target_requests_per_replica or model.engine.max_num_seqs},
    )
    with warnings.catch_warnings():
        # Deprecated in favour of environment variables that Ray 2.60 defines but does not read.
        warnings.filterwarnings(
            "ignore", message="The `metrics_interval_s` field", category=DeprecationWarning
        )
        config = ServeAutoscalingConfig(
            metrics_interval_s=min(METRICS_INTERVAL_S, scaling.look_back_period_s / 2),
            min_replicas=scaling.min_replicas,
            initial_replicas=scaling.initial_replicas,
            max_replicas=scaling.max_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            look_back_period_s=scaling.look_back_period_s,
            policy=policy,
        )
    return {"autoscaling_config": config}


class Ingress:
    """The HTTP deployment. It answers ``/health`` while tokenizers load and replicas start."""

    def __init__(self, config: BlockserveConfig, handles: dict[str, Any]) -> None:
        self.config = config
        # Here and not in `build`: this process may run on another node, and what `build` binds is pickled.
        self.api_keys = load_api_keys(config.security)
        #: Filled in the background; the routes read it at every request.
        self.models: dict[str, ModelEntry] = {}
        self.dispatcher = BatchingDispatcher(config, handles)
        self._loading: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> Any:
        self.dispatcher.start()
        self._loading = asyncio.get_running_loop().create_task(self._load_models())
        # Serve's proxy appends `x-request-id` itself.
        return create_app(
            self.config,
            self.models,
            self.dispatcher,
            api_keys=self.api_keys,
            add_request_id_header=False,
        )

    async def _load_models(self) -> None:
        """Each on its own: a model that cannot be loaded keeps no other from being served."""
        await asyncio.gather(*(self._load_model(model) for model in self.config.models))

    async def _load_model(self, model: ModelConfig) -> None:
        while model.name not in self.models:
            try:
                self.models[model.name] = await asyncio.to_thread(_load_entry, model)
            except Exception:
                logger.exception("Loading the tokenizer of %s failed; trying again.", model.name)
                await asyncio.sleep(LOAD_RETRY_DELAY_S)


def _load_entry(model: ModelConfig) -> ModelEntry:
    return load_model_entry(model, resolve_checkpoint(model.path, weights=False))
