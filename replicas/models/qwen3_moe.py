"""Qwen3-MoE: dense Qwen3 attention, sparse MLPs with softmax routing."""

from __future__ import annotations

from functools import partial

from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo
from replicas.models.decoder import DecoderModel
from replicas.models.dense import MLP, is_count, load_decoder
from replicas.models.layers import SwiGLU
from replicas.models.moe import MoE, load_experts, softmax_top_k
from replicas.models.sharding import Sharding
from replicas.models.weights import CheckpointWeights


def load_qwen3_moe(info: ModelInfo, weights: CheckpointWeights, sharding: Sharding) -> DecoderModel:
    """Qwen3MoeForCausalLM, with ``mlp_only_layers`` and ``decoder_sparse_step`` as transformers reads them."""
    config = info.config
    # transformers 5 writes `num_local_experts`, the released checkpoints have `num_experts`.
    experts = config["num_local_experts" if "num_local_experts" in config else "num_experts"]
    top_k = config["num_experts_per_tok"]
    if experts and not (is_count(experts) and is_count(top_k) and top_k <= experts):
        raise ModelLoadError(
            f"{info.path}: `num_experts_per_tok` must be 1 to the number of experts ({experts!r}), got {top_k!r}"
        )
    hidden = config["hidden_size"]
    routing = partial(softmax_top_k, k=top_k, normalize=bool(config.get("norm_topk_prob")))

    def mlp(layer: int) -> MLP:
        prefix = f"model.layers.{layer}.mlp"
        sparse = experts > 0 and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
        if layer in (config.get("mlp_only_layers") or []) or not sparse:
            return SwiGLU.load(
                weights,
                sharding,
                prefix,
                hidden,
                config["intermediate_size"],
                "intermediate_size",
                rows=weights.linear_rows,
            )
        gate = weights.take(f"{prefix}.gate.weight", experts, hidden)
        width = config["moe_intermediate_size"]
        return MoE(
            gate, routing, load_experts(weights, sharding, f"{prefix}.experts", experts, hidden, width)
        )

    return load_decoder(info, weights, sharding, mlp)
