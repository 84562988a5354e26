"""LLaDA2.0 / 2.1 (LLaDA2MoeModelLM): a Ling 2.0 mixture of experts, read with a block-causal mask.

The mask is not the model's business: the engine cuts requests into virtual requests. Fields of config.json
that the original code ignores are ignored here too: ``norm_topk_prob``, ``score_function``, ``router_dtype`` (always
normalised when k > 1, always sigmoid, always float32) and ``rotary_dim``; ``use_qk_norm`` is absent and on.
"""

from __future__ import annotations

from functools import partial

import torch

from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo
from replicas.models.decoder import DecoderLayer, DecoderModel
from replicas.models.dense import MLP, check_plain, is_count
from replicas.models.layers import Attention, AttentionShape, RotaryEmbedding, SwiGLU
from replicas.models.moe import MoE, load_experts, sigmoid_group_top_k
from replicas.models.weights import CheckpointWeights


def load_llada2_moe(info: ModelInfo, weights: CheckpointWeights, device: torch.device) -> DecoderModel:
    """Raises ``ModelLoadError`` for options of the configuration that the released models do not use."""
    config = info.config
    check_plain(info)
    for key in ("use_bias", "use_qkv_bias", "norm_head", "using_split_qkv_in_self_attention"):
        if config.get(key):
            raise ModelLoadError(f"{info.path}: `{key}` is not supported")
    if config.get("use_qk_norm") is False:
        raise ModelLoadError(f"{info.path}: LLaDA2 without QK norm (`use_qk_norm` false) is not supported")
    sizes = {key: config[key] for key in ("num_experts", "num_experts_per_tok", "n_group", "topk_group")}
    for key, value in sizes.items():
        if not is_count(value):
            raise ModelLoadError(f"{info.path}: `{key}` must be a positive integer, got {value!r}")
    experts, groups = config["num_experts"], config["n_group"]
    if experts % groups or not 1 <= config["topk_group"] <= groups:
        raise ModelLoadError(
            f"{info.path}: `num_experts` ({experts}) must be a multiple of `n_group` ({groups}), and `topk_group` "
            f"({config['topk_group']}) at most `n_group`"
        )
    reachable = experts // groups * config["topk_group"]
    if config["num_experts_per_tok"] > reachable:
        # The top-k would go on into the groups that are out.
        raise ModelLoadError(
            f"{info.path}: `num_experts_per_tok` ({config['num_experts_per_tok']}) must be at most the {reachable} "
            f"experts of `topk_group` ({config['topk_group']}) groups"
        )
    hidden, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    shape = AttentionShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or hidden // heads,
        eps=config["rms_norm_eps"],
    )
    embeddings = weights.take("model.word_embeddings.weight", vocab, hidden)
    layers = []
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        layers.append(
            DecoderLayer(
                input_norm=weights.take(f"{prefix}.input_layernorm.weight", hidden),
                attention=_attention(weights, f"{prefix}.attention", shape),
                post_attention_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
                mlp=_mlp(info, weights, i),
            )
        )
    tied = bool(config.get("tie_word_embeddings"))
    if tied:
        weights.expect_copy("lm_head.weight", embeddings)  # some exports hold the tied tensor twice
    rotary_dim = int(shape.head_dim * config.get("partial_rotary_factor", 1.0))
    return DecoderModel(
        embeddings=embeddings,
        layers=layers,
        norm=weights.take("model.norm.weight", hidden),
        lm_head=embeddings if tied else weights.take("lm_head.weight", vocab, hidden),
        rotary=RotaryEmbedding(config, rotary_dim, info.max_model_len, device),
        eps=shape.eps,
    )


def _attention(weights: CheckpointWeights, prefix: str, shape: AttentionShape) -> Attention:
    rows = shape.q_size + 2 * shape.kv_size
    return Attention(
        shape,
        qkv=weights.take(f"{prefix}.query_key_value.weight", rows, shape.hidden_size),
        out=weights.take(f"{prefix}.dense.weight", shape.hidden_size, shape.q_size),
        q_norm=weights.take(f"{prefix}.query_layernorm.weight", shape.head_dim),
        k_norm=weights.take(f"{prefix}.key_layernorm.weight", shape.head_dim),
    )


def _mlp(info: ModelInfo, weights: CheckpointWeights, layer: int) -> MLP:
    config = info.config
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}.mlp"
    if layer < config.get("first_k_dense_replace", 0):
        return SwiGLU.load(weights, prefix, hidden, config["intermediate_size"])
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    # The router's weights and bias are used in float32 whatever the model's dtype.
    gate = weights.take(f"{prefix}.gate.weight", experts, hidden, dtype=torch.float32)
    if config.get("moe_router_enable_expert_bias", True):
        bias = weights.take(f"{prefix}.gate.expert_bias", experts, dtype=torch.float32)
    else:
        bias = torch.zeros(experts, dtype=torch.float32, device=gate.device)
    routing = partial(
        sigmoid_group_top_k,
        bias=bias,
        k=config["num_experts_per_tok"],
        num_groups=config["n_group"],
        top_groups=config["topk_group"],
        scaling_factor=config.get("routed_scaling_factor", 1.0),
    )
    gate_up, down = load_experts(weights, f"{prefix}.experts", experts, hidden, width)
    num_shared = config.get("num_shared_experts") or 0
    shared = (
        SwiGLU.load(weights, f"{prefix}.shared_experts", hidden, width * num_shared) if num_shared else None
    )
    return MoE(gate, routing, gate_up, down, shared)
