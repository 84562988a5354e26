"""The configuration class of LLaDA2 checkpoints, which transformers does not have."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from replicas.model_info import LLADA2_BLOCK_LENGTH

#: Special ids of the published checkpoints; their config.json does not hold them.
_MASK_TOKEN_ID = 156895
_EOS_TOKEN_ID = 156892


class LLaDA2MoeConfig(PreTrainedConfig):
    """config.json of LLaDA2.0 and 2.1, with what the original code takes for granted.

    ``canvas_length`` (the block length) is what makes vLLM treat a model as a diffusion model.
    """

    model_type = "llada2_moe"

    def __init__(
        self,
        *,
        canvas_length: int | None = None,
        mask_token_id: int | None = None,
        head_dim: int = 128,
        partial_rotary_factor: float = 0.5,
        rope_theta: float = 600000.0,
        **kwargs: Any,
    ) -> None:
        length = canvas_length or kwargs.pop("block_length", None) or LLADA2_BLOCK_LENGTH
        self.canvas_length = int(length)
        self.mask_token_id = _MASK_TOKEN_ID if mask_token_id is None else mask_token_id
        self.head_dim = head_dim
        self.partial_rotary_factor = partial_rotary_factor
        # The original code reads `partial_rotary_factor` and no `rotary_dim`; vLLM's layer the other way round.
        kwargs["rotary_dim"] = int(head_dim * partial_rotary_factor)
        kwargs.pop("rope_scaling", None)
        kwargs.setdefault(
            "rope_parameters",
            {
                "rope_type": "default",
                "rope_theta": rope_theta,
                "partial_rotary_factor": partial_rotary_factor,
            },
        )
        # What the original code does, whatever config.json says of it.
        kwargs |= {
            "use_qk_norm": True,
            "use_rmsnorm": True,
            "norm_topk_prob": True,
            "score_function": "sigmoid",
            "router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "norm_head": False,
        }
        kwargs.setdefault("embedding_dropout", 0.0)
        kwargs.setdefault("use_bias", False)
        kwargs.setdefault("use_qkv_bias", False)
        kwargs.setdefault("num_shared_experts", 1)
        if kwargs.get("eos_token_id") is None:
            kwargs["eos_token_id"] = kwargs.get("pad_token_id") or _EOS_TOKEN_ID
        super().__init__(**kwargs)
