"""The ranks that share one model, as its layers see them."""

from __future__ import annotations

from typing import Any

import torch


class TensorParallelGroup:
    """``rank`` of ``size``; collectives over ``process_group`` (gloo or NCCL), none of them for one rank.

    All ranks must make the same calls in the same order, with tensors of the same shapes. A call raises
    ``RuntimeError`` when another rank has ended.
    """

    def __init__(self, rank: int = 0, size: int = 1, process_group: Any = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"`rank` must be 0 to {size - 1}, got {rank}")
        self.rank, self.size = rank, size
        self._process_group = process_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's contiguous ``x``, the same bits on every rank; ``x`` itself is overwritten."""
        if self.size > 1:
            self._process_group.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Every rank's ``x`` side by side along the last dimension, on rank 0; None on the others."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._process_group.gather([parts] if parts else [], [x]).wait()
        return torch.cat(parts, dim=-1) if parts else None

    def abort(self) -> None:
        """Ends NCCL kernels that wait for a rank that is gone; from any thread. Gloo notices by itself."""
        if self._process_group is not None:
            self._process_group.abort()

    def close(self) -> None:
        """Leaves the group: closes the sockets."""
        self._process_group = None


SINGLE_RANK = TensorParallelGroup()
