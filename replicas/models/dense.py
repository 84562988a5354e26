"""Dense autoregressive decoders by flags: Qwen3 (QK norm), Qwen2.5 (QKV bias), Llama-shaped; and the
attention half of Qwen3-MoE, whose layers differ in their MLP only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo
from replicas.models.decoder import DecoderLayer, DecoderModel
from replicas.models.layers import Attention, AttentionShape, RotaryEmbedding, SwiGLU
from replicas.models.weights import CheckpointWeights

MLP = Callable[[torch.Tensor], torch.Tensor]


def load_dense(info: ModelInfo, weights: CheckpointWeights, device: torch.device) -> DecoderModel:
    """Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM."""
    config = info.config
    if config.get("mlp_bias"):
        raise ModelLoadError(f"{info.path}: `mlp_bias` is not supported")

    def mlp(layer: int) -> MLP:
        prefix = f"model.layers.{layer}.mlp"
        return SwiGLU.load(weights, prefix, config["hidden_size"], config["intermediate_size"])

    return load_decoder(info, weights, device, mlp)


def load_decoder(
    info: ModelInfo, weights: CheckpointWeights, device: torch.device, mlp: Callable[[int], MLP]
) -> DecoderModel:
    """A decoder with transformers' tensor names; ``mlp(layer)`` loads the other half of a layer."""
    config = info.config
    check_plain(info)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    shape = AttentionShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        eps=config["rms_norm_eps"],
    )
    embeddings = weights.take("model.embed_tokens.weight", vocab, hidden)
    layers = []
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        layers.append(
            DecoderLayer(
                input_norm=weights.take(f"{prefix}.input_layernorm.weight", hidden),
                attention=_attention(info, weights, f"{prefix}.self_attn", shape),
                post_attention_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
                mlp=mlp(i),
            )
        )
    if config.get("tie_word_embeddings"):
        lm_head = embeddings
        weights.expect_copy("lm_head.weight", embeddings)  # some exports hold the tied tensor twice
    else:
        lm_head = weights.take("lm_head.weight", vocab, hidden)
    return DecoderModel(
        embeddings=embeddings,
        layers=layers,
        norm=weights.take("model.norm.weight", hidden),
        lm_head=lm_head,
        rotary=RotaryEmbedding(config, shape.head_dim, info.max_model_len, device),
        eps=shape.eps,
    )


def _attention(info: ModelInfo, weights: CheckpointWeights, prefix: str, shape: AttentionShape) -> Attention:
    # Qwen2's bias is part of the architecture, the others say `attention_bias`; QK norm is Qwen3's.
    qwen2, qwen3 = info.architecture == "Qwen2ForCausalLM", info.architecture.startswith("Qwen3")
    bias = qwen2 or bool(info.config.get("attention_bias"))
    sizes = {"q": shape.q_size, "k": shape.kv_size, "v": shape.kv_size}

    def joined(kind: str, *rest: int) -> torch.Tensor:
        parts = [weights.take(f"{prefix}.{n}_proj.{kind}", size, *rest) for n, size in sizes.items()]
        return torch.cat(parts)

    return Attention(
        shape,
        qkv=joined("weight", shape.hidden_size),
        qkv_bias=joined("bias") if bias else None,
        out=weights.take(f"{prefix}.o_proj.weight", shape.hidden_size, shape.q_size),
        out_bias=weights.take(f"{prefix}.o_proj.bias", shape.hidden_size) if bias and not qwen2 else None,
        q_norm=weights.take(f"{prefix}.q_norm.weight", shape.head_dim) if qwen3 else None,
        k_norm=weights.take(f"{prefix}.k_norm.weight", shape.head_dim) if qwen3 else None,
    )


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_plain(info: ModelInfo) -> None:
    """Raises ``ModelLoadError`` for sizes that no model has, and for options that would change the result and are
    not implemented."""
    config: dict[str, Any] = info.config
    sizes = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    for key in ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size"):
        if config.get(key) is not None:
            sizes[key] = config[key]
    for key, value in sizes.items():
        if not is_count(value):
            raise ModelLoadError(f"{info.path}: `{key}` must be a positive integer, got {value!r}")
    eps = config["rms_norm_eps"]
    if not isinstance(eps, int | float) or eps < 0:
        raise ModelLoadError(f"{info.path}: `rms_norm_eps` must be a number of at least 0, got {eps!r}")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(
            f"{info.path}: `hidden_act` {config['hidden_act']!r} is not supported, only 'silu'"
        )
    if config.get("use_sliding_window"):
        raise ModelLoadError(f"{info.path}: `use_sliding_window` is not supported")
    # transformers 5 says it layer by layer.
    other = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if other:
        raise ModelLoadError(f"{info.path}: `layer_types` {other} are not supported, only 'full_attention'")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelLoadError(
            f"{info.path}: `num_attention_heads` ({heads}) must be a multiple of `num_key_value_heads` ({kv_heads})"
        )
