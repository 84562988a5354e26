"""One model forward over the flattened tokens of all requests of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import CommonAttentionMetadata
from replicas.attention.virtual_batch import make_block_causal_virtual_batches
from replicas.engine.request_state import RowInput


class ModelRunner:
    """Owns the KV memory and counts what it runs.

    A slot is one page of the KV cache: row ``i`` of the block table holds a slot number, and position p of
    slot s is written at ``s * max_model_len + p``. ``block_length`` None means causal attention; a number
    means that every block of a request's query range becomes a virtual request of its own.
    """

    def __init__(self, model: Any, num_slots: int, max_model_len: int, block_length: int | None) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._block_length = block_length
        self._kv_cache: Any = KVCache.allocate(model, num_slots, max_model_len)
        self.num_forwards = 0
        #: Tokens computed that belong to a prompt (or to what a resumed request brought along).
        self.num_prefill_tokens = 0
        #: Rows that denoised a block, over all forwards.
        self.num_denoise_rows = 0
        #: The largest number of requests that one forward has served.
        self.max_requests = 0

    def forward(self, rows: Sequence[tuple[int, RowInput]]) -> torch.Tensor:
        """Hidden states [tokens of all rows, hidden size], in the order of ``rows``: (slot, input) pairs."""
        lengths = np.array([len(row.token_ids) for _, row in rows], dtype=np.int32)
        positions = np.concatenate(
            [np.arange(row.start, row.start + len(row.token_ids), dtype=np.int64) for _, row in rows]
        )
        slots = np.array([slot for slot, _ in rows], dtype=np.int32)
        token_ids = np.array([token for _, row in rows for token in row.token_ids], dtype=np.int64)
        hidden = self._model.forward(
            self._to_device(token_ids),
            self._to_device(positions),
            self._kv_cache,
            self._metadata(rows, lengths, slots, positions),
        )
        self.num_forwards += 1
        self.num_prefill_tokens += sum(row.num_prompt_tokens for _, row in rows)
        self.max_requests = max(self.max_requests, len(rows))
        if self._block_length is not None:
            self.num_denoise_rows += sum(bool(row.decide) for _, row in rows)
        return hidden

    def close(self) -> None:
        self._model = self._kv_cache = None

    def _metadata(
        self,
        rows: Sequence[tuple[int, RowInput]],
        lengths: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
    ) -> CommonAttentionMetadata:
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        seq_lens = np.array([row.start for _, row in rows], dtype=np.int32) + lengths
        slot_mapping = np.repeat(slots.astype(np.int64), lengths) * self._max_model_len + positions
        metadata = CommonAttentionMetadata(
            query_start_loc=self._to_device(query_start_loc),
            query_start_loc_cpu=torch.from_numpy(query_start_loc),
            seq_lens=self._to_device(seq_lens),
            num_reqs=len(rows),
            num_actual_tokens=int(lengths.sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self._to_device(slots[:, None]),
            slot_mapping=self._to_device(slot_mapping),
            causal=self._block_length is None,
        )
        if self._block_length is None:
            return metadata
        return make_block_causal_virtual_batches(metadata, self._block_length)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)
