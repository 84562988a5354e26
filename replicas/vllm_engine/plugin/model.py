"""``LLaDA2MoeModelLM`` for vLLM: the backbone of BailingMoeV2, with block diffusion's state and sampler."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.bailing_moe import BailingMoE, BailingMoeV2ForCausalLM


class LLaDA2MoE(BailingMoE):
    """The original routes in float32 whatever the model's dtype; BailingMoE rounds the router's logits before."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


class LLaDA2MoeModelLM(BailingMoeV2ForCausalLM):
    """Weight names and shapes are those of the published checkpoints."""

    @staticmethod
    def get_model_state_cls() -> type:
        from replicas.vllm_engine.plugin.state import BlockDiffusionState

        return BlockDiffusionState

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        from replicas.vllm_engine.plugin.cpu_kernels import register_cpu_kernels

        register_cpu_kernels()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if type(module) is BailingMoE:
                module.__class__ = LLaDA2MoE
        #: Which of the step's logits rows are needed (int64 [rows]); None is all. Set for each step.
        self.logits_rows: torch.Tensor | None = None

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        if self.logits_rows is not None:
            hidden_states = hidden_states[self.logits_rows]
        if len(hidden_states) == 0:
            # Gathering nothing from tensor-parallel ranks ends the worker on a CPU (a division by zero).
            return hidden_states.new_empty((0, self.config.vocab_size))
        return super().compute_logits(hidden_states)
