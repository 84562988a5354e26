"""What ranks serve in tests; the ranks' processes import it too."""

from __future__ import annotations

import os
import time

import torch

from replicas.errors import ModelLoadError
from replicas.parallel.group import TensorParallelGroup


class ToyRank:
    """Remembers what it was told, with a collective per number."""

    def __init__(self, group: TensorParallelGroup, device: torch.device) -> None:
        self._group = group
        self._sums: list[float] = []

    def add(self, value: float) -> None:
        """The sum over the ranks of ``value`` times their number from 1 on."""
        x = torch.full((4,), value * (self._group.rank + 1))
        self._sums.append(self._group.all_reduce(x)[0].item())

    def sums(self) -> tuple[int, list[float]]:
        return self._group.rank, self._sums

    def length(self, data: bytes) -> int:
        return len(data)

    def refuse(self, rank: int) -> int:
        """A named error on one rank."""
        if self._group.rank == rank:
            raise ModelLoadError(f"`width` does not fit rank {rank}")
        return self._group.rank

    def divide(self, rank: int) -> float:
        """A foreign error on one rank."""
        return 1 / (self._group.rank - rank)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class EndsWhenRead:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (7,)

    def __call__(self, group: TensorParallelGroup, device: torch.device) -> ToyRank:
        raise AssertionError("it was unpickled")
