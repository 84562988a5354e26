"""Routed experts: the products of a mixture-of-experts layer, grouped by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replicas.models.layers import silu_and_mul
from replicas.models.narrow import NarrowWeights

#: On a CPU, one padded batched product instead of a loop over experts: when at most this many rows of it are padding
#: for each row that is not, and at least this share of the experts has work (it reads the weights of all).
_MAX_PADDED_ROWS = 4.0
_MIN_ACTIVE_SHARE = 0.75


class Experts:
    """SwiGLU experts. ``gate_up``: [experts, 2 * width, hidden]; ``down``: [experts, hidden, width].

    Where ``NarrowWeights`` can hold them, only those are kept, and the caller should drop the originals.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.num_experts = len(gate_up)
        self._narrow: tuple[NarrowWeights, NarrowWeights] | None = None
        narrow_gate_up = NarrowWeights.of(gate_up)
        narrow_down = None if narrow_gate_up is None else NarrowWeights.of(down)
        if narrow_gate_up is not None and narrow_down is not None:
            self._narrow = narrow_gate_up, narrow_down
        else:
            self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """``x``: [tokens, hidden]; ``expert_ids``: int64 [tokens, k]. Each token through each of its experts:
        [tokens, k, hidden]."""
        tokens, k = expert_ids.shape
        flat = expert_ids.flatten()
        order = torch.argsort(flat, stable=True)
        # `bincount` waits for a GPU.
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        grouped = x[order // k]
        if x.device.type == "cuda" and x.dtype == torch.bfloat16:
            outputs = self._grouped(grouped, counts)
        else:
            outputs = self._on_host(grouped, flat[order], counts)
        # Back in the order of each token's own choices: the sum over them does not depend on the batch.
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        return by_token.view(tokens, k, -1)

    def _on_host(self, grouped: torch.Tensor, owners: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sizes = counts.tolist()
        if self._narrow is not None:
            gate_up, down = self._narrow
            return down.products(silu_and_mul(gate_up.products(grouped, sizes)), sizes)
        largest = max(sizes)
        active = sum(size > 0 for size in sizes)
        padded = len(sizes) * largest
        if active >= _MIN_ACTIVE_SHARE * len(sizes) and padded <= (1 + _MAX_PADDED_ROWS) * len(grouped):
            return self._padded(grouped, owners, counts, largest)
        outputs = []
        start = 0
        for expert, size in enumerate(sizes):
            if size:
                hidden = silu_and_mul(F.linear(grouped[start : start + size], self.gate_up[expert]))
                outputs.append(F.linear(hidden, self.down[expert]))
                start += size
        return torch.cat(outputs)

    def _padded(
        self, grouped: torch.Tensor, owners: torch.Tensor, counts: torch.Tensor, largest: int
    ) -> torch.Tensor:
        first = torch.cumsum(counts, 0) - counts
        # Row i of an expert's group stands at [expert, i] of the padded batch.
        places = owners * largest + torch.arange(len(owners), device=owners.device) - first[owners]
        batch = grouped.new_zeros(len(counts) * largest, grouped.shape[1])
        batch[places] = grouped
        hidden = silu_and_mul(torch.bmm(batch.view(len(counts), largest, -1), self.gate_up.transpose(1, 2)))
        return torch.bmm(hidden, self.down.transpose(1, 2)).flatten(0, 1)[places]

    def _grouped(self, grouped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """One kernel for all experts, and nothing that waits for the device."""
        ends = torch.cumsum(counts, 0).to(torch.int32)
        hidden = silu_and_mul(F.grouped_mm(grouped, self.gate_up.transpose(1, 2), offs=ends))
        return F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
