"""Dense autoregressive decoders by flags: Qwen3 (QK norm), Qwen2.5 (QKV bias), Llama-shaped; and the
attention half of Qwen3-MoE, whose layers differ in their MLP only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo
from replicas.models.decoder import DecoderLayer, DecoderModel
from replicas.models.layers import Attention, AttentionShape, RMSNorm, RotaryEmbedding, SwiGLU
from replicas.models.linear import Linear, Rows
from replicas.models.sharding import Sharding, VocabularyEmbedding
from replicas.models.weights import CheckpointWeights

MLP = Callable[[torch.Tensor], torch.Tensor]


def load_dense(info: ModelInfo, weights: CheckpointWeights, sharding: Sharding) -> DecoderModel:
    """Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM."""
    config = info.config
    if config.get("mlp_bias"):
        raise ModelLoadError(f"{info.path}: `mlp_bias` is not supported")

    def mlp(layer: int) -> MLP:
        prefix = f"model.layers.{layer}.mlp"
        return SwiGLU.load(
            weights,
            sharding,
            prefix,
            config["hidden_size"],
            config["intermediate_size"],
            "intermediate_size",
            rows=weights.linear_rows,
        )

    return load_decoder(info, weights, sharding, mlp)


def load_decoder(
    info: ModelInfo, weights: CheckpointWeights, sharding: Sharding, mlp: Callable[[int], MLP]
) -> DecoderModel:
    """A decoder with transformers' tensor names; ``mlp(layer)`` loads the other half of a layer."""
    check_plain(info)
    kv_heads = info.config.get("num_key_value_heads") or info.config["num_attention_heads"]
    shape = AttentionShape.of(info.config, sharding, kv_heads)
    return assemble_decoder(
        info,
        weights,
        sharding,
        shape,
        embeddings="model.embed_tokens.weight",
        attention=lambda i: _attention(info, weights, sharding, f"model.layers.{i}.self_attn", shape),
        mlp=mlp,
        rotary_dim=shape.head_dim,
        # One row per request: prompts need the logits of their last token only.
        head_rows=Rows.FEW,
    )


def assemble_decoder(
    info: ModelInfo,
    weights: CheckpointWeights,
    sharding: Sharding,
    shape: AttentionShape,
    *,
    embeddings: str,
    attention: Callable[[int], Attention],
    mlp: Callable[[int], MLP],
    rotary_dim: int,
    head_rows: Rows,
) -> DecoderModel:
    """The parts that all architectures have under the same names; ``attention(layer)`` and ``mlp(layer)`` load theirs,
    ``embeddings`` is a tensor's name, ``head_rows`` the rows of a step that need logits."""
    config = info.config
    vocab, hidden = config["vocab_size"], shape.hidden_size
    rows = sharding.vocabulary(vocab)
    # The largest tensors first, while nothing else is there: their copies decide the peak of memory.
    stored = weights.take(embeddings, vocab, hidden, shard=rows, dtype=weights.narrowest_dtype(embeddings))
    embedding = VocabularyEmbedding(stored, rows, sharding.group, weights.dtype)
    if config.get("tie_word_embeddings"):
        # Some exports hold the tied tensor twice.
        weights.expect_copy("lm_head.weight", vocab, hidden, of=stored, shard=rows)
        head = stored.to(weights.dtype)
    else:
        head = weights.take("lm_head.weight", vocab, hidden, shard=rows)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.take(name, hidden), shape.eps)

    def load_layer(i: int) -> DecoderLayer:
        return DecoderLayer(
            input_norm=norm(f"model.layers.{i}.input_layernorm.weight"),
            attention=attention(i),
            post_attention_norm=norm(f"model.layers.{i}.post_attention_layernorm.weight"),
            mlp=mlp(i),
        )

    # torch packs a weight on one thread; the other cores take other layers.
    with ThreadPoolExecutor(torch.get_num_threads() if weights.device.type == "cpu" else 1) as pool:
        lm_head = pool.submit(Linear, head, rows=head_rows)
        del head
        try:
            layers = list(pool.map(load_layer, range(config["num_hidden_layers"])))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return DecoderModel(
        embeddings=embedding,
        layers=layers,
        norm=norm("model.norm.weight"),
        lm_head=lm_head.result(),
        vocab_size=vocab,
        rotary=RotaryEmbedding(config, rotary_dim, info.max_model_len, weights.device),
        group=sharding.group,
    )


def _attention(
    info: ModelInfo, weights: CheckpointWeights, sharding: Sharding, prefix: str, shape: AttentionShape
) -> Attention:
    # Qwen2's bias is part of the architecture, the others say `attention_bias`; QK norm is Qwen3's.
    qwen2, qwen3 = info.architecture == "Qwen2ForCausalLM", info.architecture.startswith("Qwen3")
    bias = qwen2 or bool(info.config.get("attention_bias"))
    q, kv = shape.q_shard(sharding), shape.kv_shard(sharding)
    parts = {"q": (shape.total_heads, q), "k": (shape.total_kv_heads, kv), "v": (shape.total_kv_heads, kv)}

    def joined(kind: str, *rest: int) -> torch.Tensor:
        return torch.cat(
            [
                weights.take(f"{prefix}.{name}_proj.{kind}", heads * shape.head_dim, *rest, shard=shard)
                for name, (heads, shard) in parts.items()
            ]
        )

    # Of a sum over ranks, one adds the bias.
    out_bias = None
    if bias and not qwen2:
        out_bias = weights.take(f"{prefix}.o_proj.bias", shape.hidden_size)
    out = weights.take(
        f"{prefix}.o_proj.weight",
        shape.hidden_size,
        shape.total_heads * shape.head_dim,
        shard=shape.q_shard(sharding, dim=1),
    )
    qkv_bias = joined("bias") if bias else None
    return Attention(
        shape,
        qkv=Linear(joined("weight", shape.hidden_size), qkv_bias, rows=weights.linear_rows),
        out=Linear(out, out_bias if sharding.group.rank == 0 else None, rows=weights.linear_rows),
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
