"""Layers that the architectures share. Inference only: tensors, no autograd, flat batches of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from replicas.attention.metadata import AttentionPlan, CommonAttentionMetadata
from replicas.attention.sdpa import paged_attention, write_kv
from replicas.errors import ModelLoadError
from replicas.models.linear import Linear, Rows
from replicas.models.sharding import Shard, Sharding
from replicas.models.weights import CheckpointWeights


class RMSNorm:
    """Root-mean-square norm over the last dimension: computed in float32, cast back, then weighted.

    ``weight``: [..., size], broadcast against the input.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._size = weight.shape[-1]
        # x / sqrt(mean(x^2) + eps) = sqrt(size) * x / hypot(norm(x), sqrt(size * eps))
        root = math.sqrt(self._size)
        self._root = root
        self._floor = torch.tensor(root * math.sqrt(eps), dtype=torch.float32, device=weight.device)
        self._scaled_weight = weight * root if weight.dtype == torch.float32 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x.float(), (self._size,), None, self.eps).to(x.dtype) * self.weight
        # torch has no kernel of its own for this norm on a CPU, and its composition takes twice as many operations.
        wide = x.float()
        normed = wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._floor)
        if self._scaled_weight is not None:
            return normed.mul_(self._scaled_weight)
        return normed.mul_(self._root).to(x.dtype) * self.weight


@dataclass(frozen=True)
class StepContext:
    """What every layer of one forward shares. ``cos``, ``sin``: [tokens, 1, rotary_dim]."""

    cos: torch.Tensor
    sin: torch.Tensor
    metadata: CommonAttentionMetadata
    plan: AttentionPlan


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
        # For a half (a, b) the result is (a cos - b sin, b cos + a sin): x * cos + swapped halves * signed sin.
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
        self.rotary_dim = rotary_dim

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of ``positions`` [tokens], each [tokens, 1, rotary_dim], for ``apply``."""
        return self._cos[positions][:, None].to(dtype), self._sin[positions][:, None].to(dtype)

    @staticmethod
    def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates ``x`` [tokens, heads, head_dim]."""
        rotary_dim = cos.shape[-1]
        if rotary_dim == x.shape[-1]:
            return torch.addcmul(x * cos, x.roll(rotary_dim // 2, dims=-1), sin)
        rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat((RotaryEmbedding.apply(rotated, cos, sin), rest), dim=-1)

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
    """Sizes of an attention layer, and the part of it that this rank computes.

    ``num_heads`` and ``num_kv_heads`` are the rank's own; ``first_kv_head`` is its first one of ``total_kv_heads``.
    """

    hidden_size: int
    total_heads: int
    total_kv_heads: int
    num_heads: int
    num_kv_heads: int
    first_kv_head: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: dict[str, Any], sharding: Sharding, num_kv_heads: int) -> AttentionShape:
        """Raises ``ModelLoadError`` for head counts that do not fit the number of ranks."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        first, count = sharding.kv_heads(num_kv_heads)
        return cls(
            hidden_size=hidden,
            total_heads=heads,
            total_kv_heads=num_kv_heads,
            num_heads=sharding.split("num_attention_heads", heads),
            num_kv_heads=count,
            first_kv_head=first,
            head_dim=config.get("head_dim") or hidden // heads,
            eps=config["rms_norm_eps"],
        )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def q_shard(self, sharding: Sharding, dim: int = 0) -> Shard:
        return sharding.part(dim, self.q_size)

    def kv_shard(self, sharding: Sharding) -> Shard:
        return sharding.part(0, self.kv_size, self.first_kv_head * self.head_dim)


class Attention:
    """Grouped-query attention with one fused QKV product.

    ``qkv``: hidden to (heads + 2 kv_heads) * head_dim; ``out``: heads * head_dim to hidden; ``q_norm``, ``k_norm``:
    [head_dim] or None: per-head RMSNorm before the rotary embedding. Under tensor parallelism the result is this
    rank's part of a sum.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        qkv: Linear,
        out: Linear,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.qkv, self.out = qkv, out
        self.qk_norm: RMSNorm | None = None
        if q_norm is not None and k_norm is not None:
            # Queries and keys are normalised and rotated together: [heads + kv_heads, head_dim].
            self.qk_norm = RMSNorm(
                torch.cat((q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1))),
                shape.eps,
            )

    def __call__(
        self, x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """``x``: [tokens, hidden]. Writes the step's keys and values, then attends."""
        shape = self.shape
        heads = self.qkv(x).view(len(x), -1, shape.head_dim)
        qk, v = heads[:, : -shape.num_kv_heads], heads[:, -shape.num_kv_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = RotaryEmbedding.apply(qk, step.cos, step.sin)
        q, k = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
        write_kv(k, v, k_cache, v_cache, step.metadata.slot_mapping)
        out = paged_attention(q, k_cache, v_cache, step.metadata, shape.head_dim**-0.5, plan=step.plan)
        return self.out(out.reshape(-1, shape.q_size))


class SwiGLU:
    """down(silu(gate(x)) * up(x)), with gate and up in one product: ``gate_up``: hidden to 2 * width."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    @classmethod
    def load(
        cls,
        weights: CheckpointWeights,
        sharding: Sharding,
        prefix: str,
        hidden: int,
        width: int,
        name: str,
        *,
        rows: Rows,
    ) -> SwiGLU:
        """This rank's part of ``{prefix}.{gate,up,down}_proj.weight``; ``name`` is the field that gives ``width``."""
        gate_up, down = load_swiglu(weights, sharding, prefix, hidden, width, name)
        return cls(Linear(gate_up, rows=rows), Linear(down, rows=rows))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))


def load_swiglu(
    weights: CheckpointWeights, sharding: Sharding, prefix: str, hidden: int, width: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gate_up`` [2 * own width, hidden] and ``down`` [hidden, own width] of this rank."""
    own = sharding.split(name, width)
    rows, columns = sharding.part(0, own), sharding.part(1, own)
    gate = weights.take(f"{prefix}.gate_proj.weight", width, hidden, shard=rows)
    up = weights.take(f"{prefix}.up_proj.weight", width, hidden, shard=rows)
    down = weights.take(f"{prefix}.down_proj.weight", hidden, width, shard=columns)
    return torch.cat((gate, up)), down


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [..., 2 * width]: [..., width]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
