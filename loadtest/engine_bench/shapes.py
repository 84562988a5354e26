"""Checkpoints with random weights: shapes of real models to time, and small ones to check tokens on."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loadtest.engine_bench.spec import BenchError
from replicas.demo.cache import build_once, default_cache_dir

Config = dict[str, Any]

#: Sizes of Qwen3-0.6B.
QWEN3_0_6B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

#: LLaDA2's architecture at a size that a laptop denoises.
LLADA2_SMALL: Config = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "block_length": 32,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "mask_token_id": 32767,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 128,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "pad_token_id": 32766,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_qkv_bias": False,
    "vocab_size": 32768,
}

SHAPES = {"qwen3-0.6b": QWEN3_0_6B, "llada2-small": LLADA2_SMALL}

#: Standard deviation of the weights of a shape.
TIMED_STD = 0.02
#: Of a small checkpoint. Larger, so that a token depends on all that came before it: with 0.02 every request soon
#: repeats one token, and a mixed-up batch would go unseen.
CHECK_STD = 0.08
_RECIPE = "1"


def write_checkpoint(folder: Path, config: Config, *, std: float, dtype: torch.dtype) -> None:
    """Writes config.json and model.safetensors: normal weights of deviation ``std``, norms of 1. Every tensor has a
    generator of its own, keyed by its name."""
    tensors = {}
    for name, shape in tensor_shapes(config):
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=dtype)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensors[name] = torch.empty(shape).normal_(0.0, std, generator=generator).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")


def cached_checkpoint(name: str, config: Config, *, std: float, dtype: torch.dtype) -> Path:
    """The folder of such a checkpoint in the cache, written when it is not there yet."""
    recipe = json.dumps([_RECIPE, config, std, str(dtype)], sort_keys=True)
    target = default_cache_dir() / "bench" / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:10]}"

    def build(folder: Path) -> None:
        write_checkpoint(folder, config, std=std, dtype=dtype)

    return build_once(target, ("config.json", "model.safetensors"), build, version=_RECIPE)


def resolve_shape(shape: str) -> tuple[str, Path]:
    """(name, checkpoint directory) of a name in ``SHAPES`` or of a directory. Raises ``BenchError``."""
    if shape in SHAPES:
        return shape, cached_checkpoint(shape, SHAPES[shape], std=TIMED_STD, dtype=torch.bfloat16)
    folder = Path(shape)
    if not (folder / "config.json").is_file():
        raise BenchError(
            f"`--shape` must be {', '.join(SHAPES)} or a checkpoint directory with a config.json, got {shape!r}"
        )
    return folder.name or shape, folder.resolve()


def check_config(config: Config) -> Config:
    """``config`` with small sizes: 4 layers, hidden 256, 4096 tokens. What is not a size stays: tied embeddings,
    biases, RoPE, routing flags."""
    small = dict(config)
    for key in ("quantization_config", "layer_types", "bos_token_id", "eos_token_id", "max_window_layers"):
        small.pop(key, None)
    small |= {
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "torch_dtype": "bfloat16",
        "vocab_size": 4096,
    }
    small.pop("pad_token_id", None)
    if "moe_intermediate_size" in config:
        experts = {
            "moe_intermediate_size": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "mlp_only_layers": [],
        }
        small |= experts
        small.pop("num_local_experts", None)
    if config["architectures"][0] == "LLaDA2MoeModelLM":
        small |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        small |= {"mask_token_id": 4095, "pad_token_id": 4094}
    return small


def tensor_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors, for the architectures that the engine loads."""
    architecture = config["architectures"][0]
    llada2 = architecture == "LLaDA2MoeModelLM"
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    attention = _llada2_attention if llada2 else _attention
    yield ("model.word_embeddings.weight" if llada2 else "model.embed_tokens.weight"), (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from attention(config, prefix)
        if llada2 and layer >= config["first_k_dense_replace"]:
            yield from _experts(config, prefix)
            yield f"{prefix}.mlp.gate.expert_bias", (config["num_experts"],)
            shared = config["moe_intermediate_size"] * config["num_shared_experts"]
            yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, shared)
        elif architecture == "Qwen3MoeForCausalLM":
            yield from _experts(config, prefix)
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocab, hidden)


def _attention(config: Config, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    architecture, hidden, head_dim = config["architectures"][0], config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qwen2 = architecture == "Qwen2ForCausalLM"
    for name, size in (("q", query), ("k", kv), ("v", kv)):
        yield f"{prefix}.self_attn.{name}_proj.weight", (size, hidden)
        if qwen2 or config.get("attention_bias"):
            yield f"{prefix}.self_attn.{name}_proj.bias", (size,)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
    if config.get("attention_bias") and not qwen2:
        yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
    if architecture.startswith("Qwen3"):
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)


def _llada2_attention(config: Config, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    rows = (heads + 2 * config["num_key_value_heads"]) * head_dim
    yield f"{prefix}.attention.query_key_value.weight", (rows, hidden)
    yield f"{prefix}.attention.dense.weight", (hidden, heads * head_dim)
    yield f"{prefix}.attention.query_layernorm.weight", (head_dim,)
    yield f"{prefix}.attention.key_layernorm.weight", (head_dim,)


def _experts(config: Config, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.mlp.gate.weight", (config["num_experts"], config["hidden_size"])
    for expert in range(config["num_experts"]):
        name = f"{prefix}.mlp.experts.{expert}"
        yield from _mlp(name, config["hidden_size"], config["moe_intermediate_size"])


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
