"""What part of each tensor a tensor-parallel rank holds.

The layout is Megatron-LM's (Shoeybi et al. 2019): the first product of a pair is split by its outputs, the second
by its inputs, so one sum over the ranks follows each pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replicas.errors import ModelLoadError
from replicas.parallel.group import SINGLE_RANK, TensorParallelGroup


@dataclass(frozen=True)
class Shard:
    """Indices [start, end) of dimension ``dim``; where ``end`` is past the tensor's end, zeros follow."""

    dim: int
    start: int
    end: int


class Sharding:
    """Cuts sizes of a checkpoint at ``path`` (named in errors) for one rank of ``group``."""

    def __init__(self, path: object, group: TensorParallelGroup = SINGLE_RANK) -> None:
        self._path = path
        self.group = group

    def split(self, name: str, size: int) -> int:
        """``size`` over the ranks. Raises ``ModelLoadError`` that names ``name`` when it does not divide."""
        if size % self.group.size:
            raise ModelLoadError(
                f"{self._path}: `{name}` ({size}) must be a multiple of `tensor_parallel_size` ({self.group.size})"
            )
        return size // self.group.size

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """(first KV head, number of KV heads) of this rank. With more ranks than heads, each head is held by
        several ranks; raises ``ModelLoadError`` when neither number is a multiple of the other."""
        size, rank = self.group.size, self.group.rank
        if num_kv_heads % size == 0:
            count = num_kv_heads // size
            return rank * count, count
        if size % num_kv_heads == 0:
            return rank // (size // num_kv_heads), 1
        raise ModelLoadError(
            f"{self._path}: `num_key_value_heads` ({num_kv_heads}) must be a multiple or a divisor of "
            f"`tensor_parallel_size` ({size})"
        )

    def part(self, dim: int, length: int, start: int | None = None) -> Shard:
        """``length`` indices of ``dim``: this rank's, or from ``start``."""
        start = self.group.rank * length if start is None else start
        return Shard(dim, start, start + length)

    def vocabulary(self, vocab_size: int) -> Shard:
        """This rank's rows of the embeddings and of the output head; the last ranks' are padded with zeros."""
        return self.part(0, -(-vocab_size // self.group.size))


class VocabularyEmbedding:
    """Rows ``shard`` of the embeddings of a vocabulary: [rows, hidden], looked up in ``dtype``."""

    def __init__(
        self, weight: torch.Tensor, shard: Shard, group: TensorParallelGroup, dtype: torch.dtype
    ) -> None:
        self.weight = weight
        self._shard, self._group, self._dtype = shard, group, dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of int64 [tokens]"""
        if self._group.size == 1:
            return torch.nn.functional.embedding(token_ids, self.weight).to(self._dtype)
        local = token_ids - self._shard.start
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = torch.nn.functional.embedding(local.masked_fill(elsewhere, 0), self.weight).to(self._dtype)
        return self._group.all_reduce(rows.masked_fill(elsewhere[:, None], 0))
