"""What vLLM's configuration must be for LLaDA2."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.triton_utils import HAS_TRITON

SCHEDULER = "replicas.vllm_engine.plugin.scheduler.BlockDiffusionScheduler"


class BlockDiffusionConfig(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture's settings."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raises ``ValueError`` for settings that block diffusion cannot have."""
        length = int(vllm_config.model_config.hf_config.canvas_length)
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=length)
        vllm_config.attention_config.use_non_causal = True
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        scheduler.scheduler_cls = SCHEDULER
        scheduler.async_scheduling = False
        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode is None or compilation.cudagraph_mode.has_full_cudagraphs():
            # A step has as many rows of attention as blocks, not requests: neither the tensors of a full graph nor
            # the schedule that FlashAttention 3 keeps for one have room for them.
            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("`pipeline_parallel_size` must be 1 for block diffusion")
        if scheduler.max_num_batched_tokens < length:
            raise ValueError(
                f"`max_num_batched_tokens` must be at least one block ({length} tokens), got "
                f"{scheduler.max_num_batched_tokens}"
            )
        page = vllm_config.cache_config.block_size
        if page and page % length:
            raise ValueError(f"`block_size` must be a multiple of the block length {length}, got {page}")
        if model.max_model_len % length:
            raise ValueError(
                f"`max_model_len` must be a multiple of the block length {length}, got {model.max_model_len}"
            )


def allow_model_runner_without_triton() -> None:
    """vLLM's second model runner, the one for diffusion models, asks for Triton, which the CPU build lacks.

    There ``cpu_kernels`` stands in for the kernels that such a model reaches; so the question is not asked for
    diffusion models. Beside these two names of vLLM, ``cpu_seeds`` replaces two more.
    """
    if HAS_TRITON or getattr(VllmConfig, "_blockserve_runner", False):
        return
    asks: Any = VllmConfig.use_v2_model_runner
    validates: Any = VllmConfig._validate_v2_model_runner

    def is_diffusion(config: Any) -> bool:
        return config.model_config is not None and config.model_config.is_diffusion

    def use_v2_model_runner(self: Any) -> bool:
        if is_diffusion(self) and envs.VLLM_USE_V2_MODEL_RUNNER is None:
            return True
        return asks.fget(self)

    def validate_v2_model_runner(self: Any) -> None:
        if not is_diffusion(self):
            validates(self)

    config: Any = VllmConfig
    config.use_v2_model_runner = property(use_v2_model_runner)
    config._validate_v2_model_runner = validate_v2_model_runner
    config._blockserve_runner = True
