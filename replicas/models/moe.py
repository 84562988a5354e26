"""Mixture-of-experts layers: routing rules, and the layer itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from replicas.models.experts import Experts
from replicas.models.layers import SwiGLU, load_swiglu
from replicas.models.sharding import Sharding
from replicas.models.weights import CheckpointWeights

#: router logits float32 [tokens, experts] -> (expert ids int64 [tokens, k], weights float32 [tokens, k])
Routing = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def softmax_top_k(logits: torch.Tensor, k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3-MoE: the k largest of softmax(logits), their weights normalised to sum 1 if ``normalize``."""
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights


def sigmoid_group_top_k(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    *,
    num_groups: int,
    top_groups: int,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LLaDA2 (Ling 2.0) routing, all in float32.

    Scores are sigmoid(logits); score + bias picks, the bare score weighs. Groups are consecutive runs of
    experts, and a group counts by the sum of its two best picks; experts outside the best ``top_groups``
    are out. Weights are normalised to sum 1, then scaled.
    """
    scores = torch.sigmoid(logits)
    picks = scores + bias
    grouped = picks.view(picks.shape[0], num_groups, -1)
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    best = torch.topk(group_scores, top_groups, dim=-1).indices
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    picks = grouped.masked_fill(~allowed[..., None], float("-inf")).view_as(picks)
    ids = torch.topk(picks, k, dim=-1).indices
    weights = scores.gather(1, ids)
    if k > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * scaling_factor


class MoE:
    """Routed experts, and optionally a shared expert that every token passes. ``gate``: [experts, hidden]."""

    def __init__(
        self,
        gate: torch.Tensor,
        routing: Routing,
        experts: Experts,
        shared: SwiGLU | None = None,
    ) -> None:
        self.gate, self.routing, self.experts, self.shared = gate.float(), routing, experts, shared

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights [tokens, k] for ``x`` [tokens, hidden]."""
        return self.routing(F.linear(x.float(), self.gate))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(x)
        outputs = self.experts(x, ids)
        routed = (outputs.float() * weights[..., None]).sum(dim=1).to(x.dtype)
        return routed if self.shared is None else routed + self.shared(x)


def load_experts(
    weights: CheckpointWeights, sharding: Sharding, prefix: str, num_experts: int, hidden: int, width: int
) -> Experts:
    """From ``{prefix}.{e}.{gate,up,down}_proj.weight``; every rank holds a part of each expert."""
    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None
    for expert in range(num_experts):
        parts = load_swiglu(weights, sharding, f"{prefix}.{expert}", hidden, width, "moe_intermediate_size")
        if gate_up is None or down is None:
            # Filled one by one: a list that is stacked afterwards would take the memory twice.
            gate_up, down = (part.new_empty(num_experts, *part.shape) for part in parts)
        gate_up[expert], down[expert] = parts
    assert gate_up is not None
    assert down is not None
    return Experts(gate_up, down)
