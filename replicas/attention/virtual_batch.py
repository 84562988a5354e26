"""Block-causal attention without a mask: requests cut into virtual requests.

In a block-diffusion model query position q sees key k iff ``k // B <= q // B``. Kernels over pages or slots
know only "causal" and "not causal" over one contiguous range of keys, so each request is cut into virtual
requests that need no mask. Requests of one step may have any prefix lengths.

Both functions take and return the field's ``CommonAttentionMetadata`` (ours, or vLLM's dataclass of that
name) and never change their input.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

Metadata = TypeVar("Metadata")


def make_block_causal_virtual_batches(attn_metadata: Metadata, block_length: int) -> Metadata:
    """The fused form: one non-causal virtual request per (request, block) of the query range.

    A virtual request has the query tokens of its block that are in this step and all keys up to the block's
    end (or to the end of the sequence, if that comes first), on the same block-table row. One kernel call then
    serves prefill chunks, denoising blocks and commit + next block pairs (2B queries) together. Every key of
    a block that a query belongs to must be in the cache or in this step: chunk borders are block borders.

    Raises ``ValueError`` for a ``block_length`` that is not a positive integer, and for a request with more query
    tokens than keys.
    """
    block_length = _integer(block_length, "block_length", minimum=1)
    metadata: Any = attn_metadata
    rows = block_causal_rows(
        np.diff(metadata.query_start_loc_cpu.numpy()), metadata.seq_lens.cpu().numpy(), block_length
    )
    device = metadata.seq_lens.device
    query_start_loc_cpu = torch.from_numpy(rows.query_start_loc)
    return _replace(
        attn_metadata,
        query_start_loc=query_start_loc_cpu.to(device),
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=torch.from_numpy(rows.seq_lens).to(device),
        num_reqs=len(rows.seq_lens),
        max_query_len=rows.max_query_len,
        max_seq_len=rows.max_seq_len,
        block_table_tensor=metadata.block_table_tensor[torch.from_numpy(rows.requests).to(device)],
        causal=False,
    )


@dataclass(frozen=True)
class BlockCausalRows:
    """Virtual requests on the host. ``query_start_loc`` int32 [rows + 1], ``seq_lens`` int32 [rows], ``requests`` int64
    [rows]: the request that a row is cut from."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    requests: np.ndarray

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max(initial=0))


def block_causal_rows(query_lens: np.ndarray, seq_lens: np.ndarray, block_length: int) -> BlockCausalRows:
    """The rows of ``make_block_causal_virtual_batches`` for requests whose last ``query_lens`` [n] of ``seq_lens`` [n]
    tokens are in this step. No device is touched. Raises ``ValueError`` for more query tokens than keys."""
    query_lens, ends = query_lens.astype(np.int64), seq_lens.astype(np.int64)
    begins = ends - query_lens
    if (begins < 0).any():
        r = int(np.argmax(begins < 0))
        raise ValueError(f"request {r}: {query_lens[r]} query tokens, but `seq_lens` has {ends[r]} keys only")
    first = begins // block_length
    counts = np.where(query_lens > 0, -(-ends // block_length) - first, 0)
    requests = np.repeat(np.arange(len(ends)), counts)
    index = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
    block_start = (first[requests] + index) * block_length
    row_ends = np.minimum(block_start + block_length, ends[requests])
    lens = row_ends - np.maximum(block_start, begins[requests])
    query_start_loc = np.zeros(len(requests) + 1, dtype=np.int32)
    np.cumsum(lens, out=query_start_loc[1:])
    return BlockCausalRows(query_start_loc, row_ends.astype(np.int32), requests)


def make_block_attention_virtual_batches(
    attn_metadata: Metadata,
    num_prefix_tokens: int | Sequence[int],
    block_size: int,
    page_size: int,
) -> tuple[Metadata | None, Metadata]:
    """The two-chunk form: every request's block attends to its prefix, and to itself; merge by log-sum-exp.

    ``num_prefix_tokens``: tokens before the block, one number per request; a plain ``int`` is the fast path of
    a batch of one. ``block_size``: tokens of the block; ``page_size``: tokens of a page.

    Returns ``(prefix_metadata | None, block_metadata)``, both non-causal; None when every prefix is empty. An
    empty prefix among others has ``seq_lens`` 0 (log-sum-exp -inf). Block-table rows are cut to the chunk's
    pages and padded with -1 (0 is a valid page). A block that starts inside a page carries
    ``first_key_offset``; metadata classes without that field (vLLM's) get a ``ValueError`` instead, because
    pages and lengths alone cannot say it.

    Raises ``ValueError`` for a count that is no non-negative integer, for a number of counts that is not
    the number of requests, for a request with more query tokens than one block (the fused form takes those),
    and for a block whose pages the block table does not have.
    """
    metadata: Any = attn_metadata
    block_size = _integer(block_size, "block_size", minimum=1)
    page_size = _integer(page_size, "page_size", minimum=1)
    prefixes = _prefix_lengths(num_prefix_tokens, metadata.num_reqs)
    starts = metadata.query_start_loc_cpu.tolist()
    for r in range(len(prefixes)):
        if starts[r + 1] - starts[r] > block_size:
            raise ValueError(
                f"request {r}: {starts[r + 1] - starts[r]} query tokens do not fit one block of {block_size}; "
                "make_block_causal_virtual_batches takes several blocks"
            )
    table = metadata.block_table_tensor
    first = [prefix // page_size for prefix in prefixes]
    last = [-(-(prefix + block_size) // page_size) for prefix in prefixes]
    for r, (begin, end) in enumerate(zip(first, last, strict=True)):
        if end > table.shape[1]:
            raise ValueError(
                f"request {r}: its block (tokens {prefixes[r]} to {prefixes[r] + block_size}) needs pages "
                f"[{begin}:{end}], but the block table has {table.shape[1]} columns"
            )
    offsets = [prefix % page_size for prefix in prefixes]
    changes: dict[str, Any] = {}
    if any(offsets):
        if not hasattr(metadata, "first_key_offset"):
            r = next(r for r, offset in enumerate(offsets) if offset)
            raise ValueError(
                f"request {r}: `num_prefix_tokens` {prefixes[r]} is not a multiple of the page size {page_size}, and "
                f"{type(metadata).__name__} cannot describe a block that starts inside a page"
            )
        changes["first_key_offset"] = torch.tensor(offsets, dtype=torch.int32, device=table.device)
    elif getattr(metadata, "first_key_offset", None) is not None:
        changes["first_key_offset"] = None
    block = _chunk(attn_metadata, [block_size] * len(prefixes), first, last, changes)
    if not any(prefixes):
        return None, block
    pages = [-(-prefix // page_size) for prefix in prefixes]
    changes = {"first_key_offset": None} if hasattr(metadata, "first_key_offset") else {}
    return _chunk(attn_metadata, prefixes, [0] * len(pages), pages, changes), block


def _chunk(
    metadata: Any, seq_lens: list[int], first: list[int], last: list[int], changes: dict[str, Any]
) -> Any:
    """``metadata`` with ``seq_lens`` and, in each row, the pages [first, last) of its block table."""
    table = metadata.block_table_tensor
    begin = torch.tensor(first, device=table.device)[:, None]
    count = torch.tensor(last, device=table.device)[:, None] - begin
    column = torch.arange(max(b - a for a, b in zip(first, last, strict=True)), device=table.device)[None, :]
    inside = column < count
    pages = table.gather(1, torch.where(inside, begin + column, 0).long())
    return _replace(
        metadata,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(metadata.seq_lens.device),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.where(inside, pages, -1).to(table.dtype),
        causal=False,
        **changes,
    )


def _replace(metadata: Any, **changes: Any) -> Any:
    """A shallow copy with ``changes``. What the class keeps beside ``seq_lens``, copies of it and private caches of
    what follows from it (vLLM's ``_seq_lens_cpu``, ``_num_computed_tokens_cache``), is dropped: it would describe
    the old rows."""
    result = copy.copy(metadata)
    for name in vars(metadata):
        if name != "seq_lens" and ("seq_lens" in name or name.startswith("_")):
            setattr(result, name, None)
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def _prefix_lengths(num_prefix_tokens: int | Sequence[int], num_reqs: int) -> list[int]:
    name = "num_prefix_tokens"
    if not isinstance(num_prefix_tokens, Sequence):
        prefix = _integer(num_prefix_tokens, name, minimum=0)
        if num_reqs != 1:
            raise ValueError(
                f"`{name}` is one number ({prefix}), but the batch has {num_reqs} requests: give a list"
            )
        return [prefix]
    prefixes = [_integer(value, f"{name}[{r}]", minimum=0) for r, value in enumerate(num_prefix_tokens)]
    if len(prefixes) != num_reqs:
        raise ValueError(f"`{name}` has {len(prefixes)} entries, but the batch has {num_reqs} requests")
    return prefixes


def _integer(value: Any, name: str, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"`{name}` must be an integer of at least {minimum}, got {value!r}")
    return int(value)
