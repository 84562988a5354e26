"""Muon in float32, with matrices of one shape orthogonalised together.

`torch.optim.Muon` works in bfloat16, one matrix at a time: on CPUs without bfloat16 units that takes far
longer than the model's own forward and backward. The rule is Keller Jordan's
(https://kellerjordan.github.io/posts/muon/), quintic coefficients included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is brought near the closest orthogonal matrix.

    Args:
        params: matrices [A, B] only.
        lr: step; a matrix moves by lr * sqrt(max(1, A / B)) times an orthogonal matrix.
        momentum: of the gradient average.
        weight_decay: decoupled, per unit of lr.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient are left alone. `closure` is not supported."""
        if closure is not None:
            raise ValueError("`closure` is not supported")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    gradient: Tensor = parameter.grad  # type: ignore[assignment]
                    average = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    average.lerp_(gradient, 1 - group["momentum"])
                    updates.append(torch.lerp(gradient, average, group["momentum"]))
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonal(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Newton-Schulz: [N, A, B] -> [N, A, B] with singular values in about 0.7..1.2, same singular vectors."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT
