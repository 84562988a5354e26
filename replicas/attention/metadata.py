"""What an attention call must know of its batch, under the field's names (vLLM's `CommonAttentionMetadata`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class CommonAttentionMetadata:
    """A batch of ``n`` requests whose query tokens stand one after another in one flat tensor.

    ``query_start_loc`` int32 [n+1] and its CPU twin: request r owns query tokens [loc[r], loc[r+1]), and they are
    the last ones of its sequence. ``seq_lens`` int32 [n]: keys of each request, this step's included.
    ``block_table_tensor`` int32 [n, pages]: the pages that hold a request's keys, -1 where there is none.
    ``slot_mapping`` int64 [tokens]: where each query token's key and value are written, ``page * page_size +
    offset``. ``causal`` aligns the mask at the end (the last query sees all keys).
    ``first_key_offset`` int32 [n] or None (zeros): keys of the first page to skip, for a range of keys that
    starts inside a page.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    first_key_offset: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionRow:
    """One request of a batch, on the host: query tokens [start, end), keys, pages."""

    start: int
    end: int
    seq_len: int
    pages: tuple[int, ...]
    offset: int = 0


def attention_rows(metadata: CommonAttentionMetadata, page_size: int) -> list[AttentionRow]:
    """The rows of ``metadata`` on the host: once per step, not once per layer (it waits for a GPU)."""
    starts = metadata.query_start_loc_cpu.tolist()
    seq_lens = metadata.seq_lens.tolist()
    tables = metadata.block_table_tensor.tolist()
    offset_tensor = metadata.first_key_offset
    offsets = [0] * len(seq_lens) if offset_tensor is None else offset_tensor.tolist()
    rows = []
    for r, (seq_len, offset) in enumerate(zip(seq_lens, offsets, strict=True)):
        pages = tuple(tables[r][: -(-(seq_len + offset) // page_size)])
        if len(pages) * page_size < seq_len + offset or -1 in pages:
            raise ValueError(
                f"request {r}: {seq_len} keys from offset {offset} need {-(-(seq_len + offset) // page_size)} pages of "
                f"{page_size}, but its block table row is {tables[r]}"
            )
        rows.append(AttentionRow(starts[r], starts[r + 1], seq_len, pages, offset))
    return rows
