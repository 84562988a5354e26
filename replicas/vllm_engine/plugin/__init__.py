"""LLaDA2 for vLLM, through its own hooks for diffusion models.

The entry point ``vllm.general_plugins`` names ``register``: vLLM calls it in each of its processes. For other models
nothing changes but what ``cpu_seeds`` and ``grammar_bounds`` mend.
"""

from __future__ import annotations

ARCHITECTURE = "LLaDA2MoeModelLM"


def register() -> None:
    """Makes vLLM know LLaDA2; safe to call again."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from replicas.vllm_engine.plugin.cpu_seeds import keep_seeds_of_chunked_prompts
    from replicas.vllm_engine.plugin.grammar_bounds import bound_grammars
    from replicas.vllm_engine.plugin.hf_config import LLaDA2MoeConfig
    from replicas.vllm_engine.plugin.vllm_config import (
        BlockDiffusionConfig,
        allow_model_runner_without_triton,
    )

    AutoConfig.register(LLaDA2MoeConfig.model_type, LLaDA2MoeConfig, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "replicas.vllm_engine.plugin.model:LLaDA2MoeModelLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = BlockDiffusionConfig
    allow_model_runner_without_triton()
    keep_seeds_of_chunked_prompts()
    bound_grammars()
