"""What an attention call must know of its batch, under the field's names (vLLM's `CommonAttentionMetadata`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True)
class AttentionGroup:
    """Rows that one attention call serves: the same number of query tokens, and consecutive pages, one a row.

    ``queries``: slice or int64 tensor [rows * q_len] that picks their query tokens. ``first_page``, ``num_rows``: pages
    [first_page, first_page + num_rows). ``max_seq_len``: keys that are read of each page. ``mask``: [rows, 1, 1,
    max_seq_len], 0 where a row has a key and -inf elsewhere, or None when all have ``max_seq_len`` keys.
    """

    queries: slice | torch.Tensor
    num_rows: int
    q_len: int
    first_page: int
    max_seq_len: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """How the rows of a step are served: once per step, for all layers."""

    groups: list[AttentionGroup]
    #: Served one by one.
    rows: list[AttentionRow]


#: Keys read for nothing, at most, as a share of those that a group needs.
_MAX_PADDING = 0.25


def attention_plan(
    metadata: CommonAttentionMetadata, page_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionPlan:
    """Puts rows that need no mask inside their queries into groups: a call for each row of each layer costs more than
    the arithmetic of a decoding row. Rows of very different lengths are not grouped, and none are in float16: keys past
    a row's end are what an earlier request left, and where that overflowed, a masked NaN would still be a NaN."""
    rows = attention_rows(metadata, page_size)
    if dtype == torch.float16:
        return AttentionPlan([], rows)
    single: list[AttentionRow] = []
    candidates: list[tuple[int, int, int, AttentionRow]] = []
    seen: dict[int, int] = {}
    for row in rows:
        q_len = row.end - row.start
        plain = row.seq_len and len(row.pages) == 1 and not row.offset
        if not q_len or not plain or (metadata.causal and q_len > 1):
            single.append(row)
            continue
        # Rows on the same page (a finished block and the next one) cannot stand side by side.
        occurrence = seen.get(row.pages[0], 0)
        seen[row.pages[0]] = occurrence + 1
        candidates.append((q_len, occurrence, row.pages[0], row))
    candidates.sort(key=lambda item: item[:3])
    groups: list[AttentionGroup] = []
    run: list[AttentionRow] = []
    previous: tuple[int, int, int] | None = None
    for q_len, occurrence, page, row in candidates:
        if run and (previous != (q_len, occurrence, page - 1) or not _worth_padding([*run, row])):
            _close(run, groups, single, dtype, device)
            run = []
        run.append(row)
        previous = (q_len, occurrence, page)
    _close(run, groups, single, dtype, device)
    return AttentionPlan(groups, single)


def _worth_padding(rows: list[AttentionRow]) -> bool:
    needed = sum(row.seq_len for row in rows)
    return max(row.seq_len for row in rows) * len(rows) <= (1 + _MAX_PADDING) * needed


def _close(
    run: list[AttentionRow],
    groups: list[AttentionGroup],
    single: list[AttentionRow],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if len(run) < 2:
        single.extend(run)
        return
    q_len = run[0].end - run[0].start
    longest = max(row.seq_len for row in run)
    queries: slice | torch.Tensor = slice(run[0].start, run[-1].end)
    if any(a.end != b.start for a, b in pairwise(run)):
        queries = torch.tensor([token for row in run for token in range(row.start, row.end)], device=device)
    mask = None
    if any(row.seq_len != longest for row in run):
        lengths = torch.tensor([row.seq_len for row in run], device=device)
        hidden = torch.arange(longest, device=device)[None] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        mask = mask[:, None, None]
    groups.append(AttentionGroup(queries, len(run), q_len, run[0].pages[0], longest, mask))
