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
from replicas.models.decoder import DecoderModel
from replicas.models.dense import MLP, assemble_decoder, check_plain, is_count
from replicas.models.layers import Attention, AttentionShape, SwiGLU
from replicas.models.linear import Linear, Rows
from replicas.models.moe import MoE, load_experts, sigmoid_group_top_k
from replicas.models.sharding import Sharding
from replicas.models.weights import CheckpointWeights

#: A step holds a whole block of every request.
_ROWS = Rows.MANY


def load_llada2_moe(info: ModelInfo, weights: CheckpointWeights, sharding: Sharding) -> DecoderModel:
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
    shape = AttentionShape.of(config, sharding, config["num_key_value_heads"])
    return assemble_decoder(
        info,
        weights,
        sharding,
        shape,
        embeddings="model.word_embeddings.weight",
        attention=lambda i: _attention(weights, sharding, f"model.layers.{i}.attention", shape),
        mlp=lambda i: _mlp(info, weights, sharding, i),
        head_rows=_ROWS,
        rotary_dim=int(shape.head_dim * config.get("partial_rotary_factor", 1.0)),
    )


def _attention(
    weights: CheckpointWeights, sharding: Sharding, prefix: str, shape: AttentionShape
) -> Attention:
    # One tensor holds all of Q, then all of K, then all of V.
    heads, kv_heads, hidden = shape.total_heads, shape.total_kv_heads, shape.hidden_size
    first_k, first_v = heads * shape.head_dim, (heads + kv_heads) * shape.head_dim
    kv = shape.kv_shard(sharding)
    parts = (
        shape.q_shard(sharding),
        sharding.part(0, shape.kv_size, first_k + kv.start),
        sharding.part(0, shape.kv_size, first_v + kv.start),
    )
    qkv = weights.take_parts(
        f"{prefix}.query_key_value.weight",
        (heads + 2 * kv_heads) * shape.head_dim,
        hidden,
        shards=parts,
    )
    out = weights.take(
        f"{prefix}.dense.weight", hidden, heads * shape.head_dim, shard=shape.q_shard(sharding, dim=1)
    )
    return Attention(
        shape,
        qkv=Linear(qkv, rows=_ROWS),
        out=Linear(out, rows=_ROWS),
        q_norm=weights.take(f"{prefix}.query_layernorm.weight", shape.head_dim),
        k_norm=weights.take(f"{prefix}.key_layernorm.weight", shape.head_dim),
    )


def _mlp(info: ModelInfo, weights: CheckpointWeights, sharding: Sharding, layer: int) -> MLP:
    config = info.config
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}.mlp"
    if layer < config.get("first_k_dense_replace", 0):
        return SwiGLU.load(
            weights, sharding, prefix, hidden, config["intermediate_size"], "intermediate_size", rows=_ROWS
        )
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
    num_shared = config.get("num_shared_experts") or 0
    shared = None
    if num_shared:
        shared = SwiGLU.load(
            weights,
            sharding,
            f"{prefix}.shared_experts",
            hidden,
            width * num_shared,
            "moe_intermediate_size",
            rows=_ROWS,
        )
    return MoE(
        gate, routing, load_experts(weights, sharding, f"{prefix}.experts", experts, hidden, width), shared
    )
