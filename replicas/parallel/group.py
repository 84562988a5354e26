"""The ranks that share one model, as its layers see them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class TensorParallelGroup:
    """``rank`` of ``size``; collectives over ``process_group`` (torch.distributed), none of them for one rank.

    All ranks must make the same calls in the same order, with tensors of the same shapes.
    """

    def __init__(self, rank: int = 0, size: int = 1, process_group: Any = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"`rank` must be 0 to {size - 1}, got {rank}")
        self.rank, self.size = rank, size
        self._process_group = process_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``, on every rank; ``x`` itself is overwritten."""
        if self.size > 1:
            dist.all_reduce(x, group=self._process_group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Every rank's ``x`` side by side along the last dimension, on rank 0; None on the others."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts, group=self._process_group, group_dst=0)
        return torch.cat(parts, dim=-1) if parts is not None else None


SINGLE_RANK = TensorParallelGroup()
