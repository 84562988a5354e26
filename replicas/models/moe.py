"""Mixture-of-experts layers: routing rules, and experts run grouped by expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from replicas.models.layers import SwiGLU, swiglu
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
    """Routed experts, and optionally a shared expert that every token passes.

    ``gate``: [experts, hidden]; ``gate_up``: [experts, 2 * width, hidden]; ``down``: [experts, hidden, width].
    """

    def __init__(
        self,
        gate: torch.Tensor,
        routing: Routing,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared: SwiGLU | None = None,
    ) -> None:
        self.gate, self.routing, self.gate_up, self.down, self.shared = gate, routing, gate_up, down, shared

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights [tokens, k] for ``x`` [tokens, hidden]."""
        return self.routing(F.linear(x.float(), self.gate.float()))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(x)
        tokens, k = ids.shape
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        grouped = x[order // k]
        counts = torch.bincount(flat, minlength=self.gate.shape[0]).tolist()
        outputs = torch.empty_like(grouped)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                end = start + count
                outputs[start:end] = swiglu(grouped[start:end], self.gate_up[expert], self.down[expert])
                start = end
        # Back in the order of each token's own choices: the sum does not depend on the batch.
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        routed = (by_token.view(tokens, k, -1).float() * weights[..., None]).sum(dim=1).to(x.dtype)
        return routed if self.shared is None else routed + self.shared(x)


def load_experts(
    weights: CheckpointWeights, prefix: str, num_experts: int, hidden: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``{prefix}.{e}.{gate,up,down}_proj.weight`` stacked: [E, 2 * width, hidden] and [E, hidden, width]."""
    experts = [SwiGLU.load(weights, f"{prefix}.{e}", hidden, width) for e in range(num_experts)]
    return torch.stack([e.gate_up for e in experts]), torch.stack([e.down for e in experts])
