"""One tensor-parallel rank of an engine: its part of the model, and the KV memory for it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch

from replicas.attention.kv_cache import KVCache
from replicas.engine.memory import check_kv_memory, two_copies_are_too_many
from replicas.engine.model_runner import ModelRunner, StepInput
from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo
from replicas.models.registry import load_model
from replicas.parallel.group import SINGLE_RANK, TensorParallelGroup


@dataclass(frozen=True)
class KVLimits:
    """Fields of the configuration that KV memory depends on; ``max_model_len`` in tokens."""

    max_num_seqs: int
    max_model_len: int
    kv_cache_memory_bytes: int | None
    kv_memory_fraction: float


class EngineRank:
    """Loads ``model`` on its rank. On ranks other than 0 ``Ranks`` serves it: it then also holds the KV memory and runs
    the forwards, for requests that only rank 0 knows. On rank 0 the rest is the ``SlotEngine``'s."""

    def __init__(self, group: TensorParallelGroup = SINGLE_RANK, device: torch.device | None = None) -> None:
        self._group = group
        self._device = device or torch.device("cpu")
        self.model: Any = None
        self._runner: ModelRunner | None = None

    def load(
        self, info: ModelInfo, dtype: torch.dtype, num_threads: int | None, progress: bool = False
    ) -> str:
        """Loads this rank's part of the model in place of an earlier one. ``num_threads``: torch's, on a CPU.

        Returns the name of the memory that this rank shares with those that return the same name. Raises
        ``ModelLoadError``.
        """
        self.model = self._runner = None
        if self._device.type == "cpu" and num_threads is not None:
            torch.set_num_threads(num_threads)
        self.model = load_model(
            info,
            dtype=dtype,
            device=self._device,
            progress=progress,
            parallel=self._group,
            compact=self._device.type == "cpu" and two_copies_are_too_many(info),
        )
        # A GPU belongs to one rank. In a container the name is the container's, as is its memory.
        return socket.gethostname() + (f" rank {self._group.rank}" if self._device.type == "cuda" else "")

    def check_kv_memory(self, limits: KVLimits, num_ranks: int) -> int:
        """Bytes that this rank's slots need. Raises ``ModelLoadError`` as ``memory.check_kv_memory`` does."""
        return check_kv_memory(
            bytes_per_slot=KVCache.bytes_per_slot(self.model, limits.max_model_len),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            device=self._device,
            kv_cache_memory_bytes=limits.kv_cache_memory_bytes,
            kv_memory_fraction=limits.kv_memory_fraction,
            num_ranks=num_ranks,
        )

    def allocate(self, num_slots: int, max_model_len: int, block_length: int | None) -> None:
        """KV memory for an engine, in place of an earlier one's."""
        self._runner = None
        self._runner = ModelRunner(self.model, num_slots, max_model_len, block_length)

    def run(self, step: StepInput) -> None:
        """One forward; its logits are rank 0's."""
        if self._runner is None:
            raise ModelLoadError("`allocate` must come before `run`")
        for _ in self._runner.run(step):
            pass

    def num_forwards(self) -> int:
        """Forwards since ``allocate``."""
        return self._runner.num_forwards if self._runner is not None else 0
