"""Layers that the architectures share. Inference only: tensors, no autograd, flat batches of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from replicas.attention.metadata import AttentionRow, CommonAttentionMetadata
from replicas.attention.sdpa import paged_attention, write_kv
from replicas.errors import ModelLoadError
from replicas.models.weights import CheckpointWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension: computed in float32, cast back, then weighted."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


@dataclass(frozen=True)
class StepContext:
    """What every layer of one forward shares. ``cos``, ``sin``: [tokens, 1, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    metadata: CommonAttentionMetadata
    rows: Sequence[AttentionRow]


class RotaryEmbedding:
    """Half-split (NeoX) rotary embedding of the first ``rotary_dim`` dimensions of a head.

    The table of angles is float32; frequencies are theta^(-2j / rotary_dim), scaled as ``rope_scaling`` says
    (none, ``linear``, ``llama3``). Raises ``ModelLoadError`` for another scaling.
    """

    def __init__(self, config: dict[str, Any], rotary_dim: int, max_positions: int, device: torch.device):
        # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling.
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(parameters, dict):
            raise ModelLoadError(f"`rope_parameters` and `rope_scaling` must be objects, got {parameters!r}")
        theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        frequencies = self._scale(1.0 / theta**exponents, parameters)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=device), frequencies)
        self._cos, self._sin = angles.cos(), angles.sin()
        self.rotary_dim = rotary_dim

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of ``positions`` [tokens], each [tokens, 1, rotary_dim / 2]."""
        return self._cos[positions][:, None].to(dtype), self._sin[positions][:, None].to(dtype)

    @staticmethod
    def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates ``x`` [tokens, heads, head_dim]."""
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    @staticmethod
    def _scale(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default":
            return frequencies
        if kind == "linear":
            return frequencies / float(parameters["factor"])
        if kind == "llama3":
            # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.
            factor, original = float(parameters["factor"]), parameters["original_max_position_embeddings"]
            low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
            turns = original * frequencies / (2 * math.pi)
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            return frequencies * (smooth + (1 - smooth) / factor)
        raise ModelLoadError(f"rope scaling {kind!r} is not supported; known: default, linear, llama3")


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and flags of an attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class Attention:
    """Grouped-query attention with one fused QKV product.

    ``qkv``: [(heads + 2 kv_heads) * head_dim, hidden]; ``qkv_bias`` or None; ``out``: [hidden, heads * head_dim];
    ``q_norm``, ``k_norm``: [head_dim] or None: per-head RMSNorm before the rotary embedding.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        qkv: torch.Tensor,
        out: torch.Tensor,
        qkv_bias: torch.Tensor | None = None,
        out_bias: torch.Tensor | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.qkv, self.qkv_bias, self.out, self.out_bias = qkv, qkv_bias, out, out_bias
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(
        self, x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """``x``: [tokens, hidden]. Writes the step's keys and values, then attends."""
        shape = self.shape
        q, k, v = F.linear(x, self.qkv, self.qkv_bias).split(
            (shape.q_size, shape.kv_size, shape.kv_size), dim=-1
        )
        q = q.view(-1, shape.num_heads, shape.head_dim)
        k = k.view(-1, shape.num_kv_heads, shape.head_dim)
        v = v.view(-1, shape.num_kv_heads, shape.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, shape.eps), rms_norm(k, self.k_norm, shape.eps)
        q = RotaryEmbedding.apply(q, step.cos, step.sin)
        k = RotaryEmbedding.apply(k, step.cos, step.sin)
        write_kv(k, v, k_cache, v_cache, step.metadata.slot_mapping)
        out = paged_attention(q, k_cache, v_cache, step.metadata, shape.head_dim**-0.5, rows=step.rows)
        return F.linear(out.reshape(-1, shape.q_size), self.out, self.out_bias)


class SwiGLU:
    """down(silu(gate(x)) * up(x)), with gate and up in one product. ``gate_up``: [2 * width, hidden]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.gate_up, self.down = gate_up, down

    @classmethod
    def load(cls, weights: CheckpointWeights, prefix: str, hidden: int, width: int) -> SwiGLU:
        """From ``{prefix}.{gate,up,down}_proj.weight``."""
        gate = weights.take(f"{prefix}.gate_proj.weight", width, hidden)
        up = weights.take(f"{prefix}.up_proj.weight", width, hidden)
        return cls(torch.cat((gate, up)), weights.take(f"{prefix}.down_proj.weight", hidden, width))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x, self.gate_up, self.down)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
