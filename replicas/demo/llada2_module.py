"""LLaDA2-MoE as a plain differentiable torch module, for training the demo model and for cross-checks.

No KV cache, no batching of unequal lengths, no kernels: one dense block-causal mask over whole
sequences. It shares no code with the serving model, so that the two check each other; parameter names
are those of the real checkpoints, so `state_dict()` is a checkpoint.

Semantics: LLaDA2.0 / LLaDA2.1 (https://huggingface.co/inclusionAI/LLaDA2.0-mini), written from a
description of what they compute and verified against their logits.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Llada2Config:
    """The fields of a LLaDA2-MoE `config.json` that change what is computed, under their real names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    partial_rotary_factor: float = 0.5
    rope_theta: float = 600000.0
    rms_norm_eps: float = 1e-6

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Llada2Config:
        """Picks the known fields out of a parsed `config.json`; raises KeyError for a missing one."""
        names = [field.name for field in dataclasses.fields(cls)]
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = [name for name in required if name not in raw]
        if missing:
            raise KeyError(f"config.json lacks {', '.join(missing)}")
        return cls(**{name: raw[name] for name in names if name in raw})


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32, then cast back and scaled."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, without biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid router, limited to the best expert groups; always float32.

    The expert bias takes part in the choice and not in the weights. It gets no gradient: training moves
    it by hand to level the experts' load.
    """

    expert_bias: Tensor

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (expert ids [T, K] int64, weights [T, K] float32)."""
        c = self.config
        score = torch.sigmoid(x.float() @ self.weight.float().t())
        with torch.no_grad():
            biased = score + self.expert_bias.float()
            groups = biased.view(-1, c.n_group, c.num_experts // c.n_group)
            group_score = groups.topk(2, dim=-1).values.sum(-1)
            kept = torch.zeros_like(group_score, dtype=torch.bool)
            kept.scatter_(1, group_score.topk(c.topk_group, dim=-1).indices, True)
            ids = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
            ids = ids.topk(c.num_experts_per_tok, dim=-1).indices
        chosen = score.gather(1, ids)
        if c.num_experts_per_tok > 1:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return ids, chosen * c.routed_scaling_factor


class SparseMoe(nn.Module):
    """Routed experts plus an ungated, unscaled shared expert. `load` counts the last forward's choices."""

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        self.config = config
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = nn.ModuleList(SwiGLU(hidden, inner) for _ in range(config.num_experts))
        self.shared_experts = SwiGLU(hidden, inner * config.num_shared_experts)
        self.load = torch.zeros(config.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        # Tokens sorted by expert: every expert then works on one contiguous slice, and only on its own.
        order = ids.flatten().argsort(stable=True)
        self.load = torch.bincount(ids.flatten(), minlength=self.config.num_experts)
        tokens = order // ids.shape[1]
        parts = flat[tokens].split(self.load.tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        done = done.float() * weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros(flat.shape, dtype=torch.float32).index_add(0, tokens, done)
        return out.to(x.dtype).view_as(x) + self.shared_experts(x)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on Q and K heads and rotary on the first part of a head."""

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        self.config = config
        q, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, (q + 2 * kv) * d, bias=False)
        self.query_layernorm = RMSNorm(d, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(d, config.rms_norm_eps)
        self.dense = nn.Linear(q * d, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [N, S, H]; cos, sin [S, rotary]; mask [S, S], True where a query (row) sees a key."""
        c = self.config
        n, s, _ = x.shape
        heads = self.query_key_value(x).view(n, s, -1, c.head_dim).transpose(1, 2)
        q, k, v = heads.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], dim=1)
        q = rotate(self.query_layernorm(q), cos, sin)
        k = rotate(self.key_layernorm(k), cos, sin)
        repeats = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dense(out.transpose(1, 2).reshape(n, s, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split form on the first `cos.shape[-1]` dims of x [..., S, D]."""
    rotary = cos.shape[-1]
    head, rest = x[..., :rotary], x[..., rotary:]
    first, second = head.chunk(2, dim=-1)
    return torch.cat([head * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


class Layer(nn.Module):
    """Pre-norm residual layer; dense SwiGLU in the first `first_k_dense_replace` layers, experts after."""

    def __init__(self, config: Llada2Config, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = index < config.first_k_dense_replace
        self.mlp: nn.Module = (
            SwiGLU(config.hidden_size, config.intermediate_size) if dense else SparseMoe(config)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm, under the checkpoint's prefix `model.`."""

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llada2Module(nn.Module):
    """The whole model. Logits at a position are for the token at that position: nothing is shifted."""

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, block_length: int, last: int | None = None) -> Tensor:
        """Logits of whole sequences under the block-causal mask.

        Args:
            ids: [N, S] int64; positions count from 0, every row has the same length, no padding.
            block_length: a query at q sees a key at k when k // block_length <= q // block_length.
            last: only the last so many positions get logits; None means all.

        Returns:
            Logits [N, last or S, V].
        """
        c = self.config
        length = ids.shape[1]
        block = torch.arange(length) // block_length
        mask = block[None, :] <= block[:, None]
        rotary = int(c.head_dim * c.partial_rotary_factor)
        frequency = c.rope_theta ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
        angle = torch.cat([angle, angle], dim=-1)
        x = self.model.word_embeddings(ids)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        if last is not None:
            x = x[:, -last:]
        return self.lm_head(self.model.norm(x))

    def moe_layers(self) -> list[SparseMoe]:
        """The layers' expert blocks, in order."""
        return [m for m in self.modules() if isinstance(m, SparseMoe)]


def load_module(directory: Path, dtype: torch.dtype = torch.float32) -> Llada2Module:
    """Reads `config.json` and `model.safetensors` of a checkpoint with per-expert tensors.

    Raises:
        FileNotFoundError: a file is missing.
        RuntimeError: a tensor is missing, left over or of another shape.
    """
    config = Llada2Config.from_dict(json.loads((directory / "config.json").read_text()))
    module = Llada2Module(config)
    module.load_state_dict(load_file(directory / "model.safetensors"))
    bias = {id(m.gate): m.gate.expert_bias.clone() for m in module.moe_layers()}
    module = module.to(dtype).eval()
    for m in module.moe_layers():  # stays float32 whatever the dtype, as the router does
        m.gate.expert_bias = bias[id(m.gate)]
    return module
