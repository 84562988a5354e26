"""Decoding steps in a few fixed shapes, which CUDA graphs can replay without launching each kernel from Python."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import AttentionGroup, AttentionPlan, CommonAttentionMetadata

logger = logging.getLogger(__name__)

#: Keys are read up to the next power of two from here.
_MIN_KEYS = 256


class StaticDecode:
    """Runs steps in which every row computes ``q_len`` tokens (one, or one block) with a fixed number of rows and keys.

    Row i of such a step is slot i, so the keys are read in place. Rows and keys are rounded up to powers of two; what
    they are too many is masked. A slot without a row in this step writes to its last ``q_len`` positions, whose keys
    nothing reads later: the last token of a request at its longest is decided, but never computed, and its last block
    is computed anew in each pass.

    ``use_cuda_graphs``: capture each shape when it first comes, and replay it from then on.
    """

    def __init__(
        self,
        model: Any,
        kv_cache: KVCache,
        num_slots: int,
        max_model_len: int,
        q_len: int,
        *,
        use_cuda_graphs: bool,
    ) -> None:
        self._model, self._kv_cache = model, kv_cache
        self._num_slots, self._max_model_len, self._q_len = num_slots, max_model_len, q_len
        self._use_cuda_graphs = use_cuda_graphs
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._pool: Any = None

    def fits(self, lengths: np.ndarray, slots: np.ndarray) -> bool:
        """Whether a step with rows of ``lengths`` tokens in ``slots`` has this form."""
        return bool((lengths == self._q_len).all()) and len(np.unique(slots)) == len(slots)

    @torch.inference_mode()
    def forward(
        self, token_ids: np.ndarray, starts: np.ndarray, slots: np.ndarray, output_rows: np.ndarray
    ) -> torch.Tensor:
        """Final hidden states of ``output_rows``: [len(output_rows), hidden].

        ``token_ids``: int64 [rows * q_len]; row r computes its tokens at positions ``starts[r]``, ... of slot
        ``slots[r]``. ``output_rows``: int64, indices into ``token_ids``.
        """
        q_len = self._q_len
        shape = self._shape(int(slots.max()) + 1, int(starts.max()) + q_len)
        first = np.full(shape.num_rows, self._max_model_len - q_len, dtype=np.int64)
        first[slots] = starts
        positions = first[:, None] + np.arange(q_len)
        pages = np.arange(shape.num_rows, dtype=np.int64)[:, None] * self._max_model_len
        tokens = np.zeros((shape.num_rows, q_len), dtype=np.int64)
        tokens[slots] = token_ids.reshape(-1, q_len)
        # What an idle row attends to is of no use to anyone; one key keeps its numbers finite.
        num_keys = np.ones(shape.num_rows, dtype=np.int64)
        num_keys[slots] = starts + q_len
        shape.fill(tokens.ravel(), positions.ravel(), (pages + positions).ravel(), num_keys)
        hidden = self._run(shape)
        rows = slots.astype(np.int64)[output_rows // q_len] * q_len + output_rows % q_len
        return hidden[torch.from_numpy(rows).to(hidden.device)]

    def _shape(self, num_rows: int, num_keys: int) -> _Shape:
        rows = min(1 << (num_rows - 1).bit_length(), self._num_slots)
        keys = min(max(_MIN_KEYS, 1 << (num_keys - 1).bit_length()), self._max_model_len)
        if (rows, keys) not in self._shapes:
            self._shapes[rows, keys] = _Shape.allocate(rows, keys, self._q_len, self._model)
        return self._shapes[rows, keys]

    def _run(self, shape: _Shape) -> torch.Tensor:
        if not self._use_cuda_graphs:
            return self._forward(shape)
        if shape.graph is None:
            try:
                self._capture(shape)
            except RuntimeError:
                logger.exception("no CUDA graphs for this model: steps are launched kernel by kernel")
                self._use_cuda_graphs = False
                torch.cuda.synchronize()
                return self._forward(shape)
        shape.graph.replay()
        return shape.hidden

    def _capture(self, shape: _Shape) -> None:
        # Libraries allocate their workspaces on first use, which must not happen inside a capture. What these runs
        # write to the KV cache, the replay writes again.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(shape)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(shape)
        # Shapes never run at the same time, so they share one pool of memory.
        self._pool = graph.pool()
        shape.graph, shape.hidden = graph, hidden

    def _forward(self, shape: _Shape) -> torch.Tensor:
        hidden_keys = shape.key_index >= shape.num_keys_of_row[:, None]
        mask = torch.zeros(hidden_keys.shape, dtype=self._model.dtype, device=hidden_keys.device)
        mask = mask.masked_fill_(hidden_keys, -torch.inf)[:, None, None]
        group = AttentionGroup(
            queries=slice(0, shape.num_rows * self._q_len),
            num_rows=shape.num_rows,
            q_len=self._q_len,
            first_page=0,
            max_seq_len=shape.num_keys,
            mask=mask,
        )
        return self._model.forward(
            shape.token_ids,
            shape.positions,
            self._kv_cache,
            shape.metadata(self._q_len),
            plan=AttentionPlan([group], []),
        )


@dataclass
class _Shape:
    """The tensors that a graph of this shape reads and writes: they stay where they are."""

    num_rows: int
    num_keys: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_keys_of_row: torch.Tensor
    key_index: torch.Tensor
    graph: Any = None
    hidden: Any = None

    @classmethod
    def allocate(cls, num_rows: int, num_keys: int, q_len: int, model: Any) -> _Shape:
        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int64, device=model.device)

        tokens = num_rows * q_len
        key_index = torch.arange(num_keys, device=model.device)
        return cls(
            num_rows, num_keys, zeros(tokens), zeros(tokens), zeros(tokens), zeros(num_rows), key_index
        )

    def fill(
        self, token_ids: np.ndarray, positions: np.ndarray, slot_mapping: np.ndarray, num_keys: np.ndarray
    ) -> None:
        self.token_ids.copy_(torch.from_numpy(token_ids))
        self.positions.copy_(torch.from_numpy(positions))
        self.slot_mapping.copy_(torch.from_numpy(slot_mapping))
        self.num_keys_of_row.copy_(torch.from_numpy(num_keys))

    def metadata(self, q_len: int) -> CommonAttentionMetadata:
        """With a plan beside it, attention needs no more of it than ``slot_mapping``."""
        starts = torch.arange(0, self.num_rows * q_len + 1, q_len, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=self.num_keys_of_row,
            num_reqs=self.num_rows,
            num_actual_tokens=self.num_rows * q_len,
            max_query_len=q_len,
            max_seq_len=self.num_keys,
            block_table_tensor=self.num_keys_of_row[:, None],
            slot_mapping=self.slot_mapping,
            causal=False,
        )
