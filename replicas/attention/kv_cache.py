"""KV memory of the torch engine: slots of ``max_model_len`` tokens, one per running request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class KVCache:
    """``k`` and ``v``: for each layer a tensor [num_slots, max_model_len, kv_heads, head_dim].

    To attention code a slot is one page of ``max_model_len`` tokens.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @classmethod
    def allocate(cls, model: Any, num_slots: int, max_model_len: int) -> KVCache:
        """Zeroed memory in the model's dtype on its device."""
        shape = (num_slots, max_model_len, model.num_kv_heads, model.head_dim)

        def tensors() -> list[torch.Tensor]:
            return [
                torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(model.num_layers)
            ]

        return cls(tensors(), tensors())

    @staticmethod
    def bytes_per_slot(model: Any, max_model_len: int) -> int:
        """Bytes of one slot over all layers, keys and values."""
        elements = 2 * model.num_layers * max_model_len * model.num_kv_heads * model.head_dim
        return elements * torch.empty((), dtype=model.dtype).element_size()

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the keys and values of the first ``num_tokens`` positions from one slot to another."""
        for cache in (*self.k, *self.v):
            cache[target, :num_tokens].copy_(cache[source, :num_tokens])

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1]
