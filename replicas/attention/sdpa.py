"""Attention over paged or slotted keys with torch's scaled dot product attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replicas.attention.metadata import (
    AttentionGroup,
    AttentionPlan,
    AttentionRow,
    CommonAttentionMetadata,
    attention_plan,
    attention_rows,
)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes ``k``, ``v`` [tokens, kv_heads, head_dim] to ``slot_mapping`` of the caches
    [pages, page_size, kv_heads, head_dim]."""
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: CommonAttentionMetadata,
    scale: float,
    *,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention of ``q`` [tokens, heads, head_dim] to the cached keys of each row; the same shape.

    The step's own keys must be in the cache already. ``plan`` saves reading the metadata again in every
    layer. A request whose keys lie in one page (a slot) is read in place, without a copy.
    """
    plan = attention_plan(metadata, k_cache.shape[1], q.dtype, q.device) if plan is None else plan
    if len(plan.groups) == 1 and not plan.rows and isinstance(plan.groups[0].queries, slice):
        return _grouped(q, k_cache, v_cache, plan.groups[0], scale)
    output = torch.empty_like(q)
    for group in plan.groups:
        output[group.queries] = _grouped(q, k_cache, v_cache, group, scale)
    for row in plan.rows:
        if row.start == row.end:
            continue
        query = q[row.start : row.end]
        if not row.seq_len:
            output[row.start : row.end] = 0
            continue
        key, value = _keys(k_cache, row), _keys(v_cache, row)
        q_len = row.end - row.start
        if metadata.causal and q_len > 1:
            result = _causal(query, key, value, scale)
        else:
            key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
            result = _unmasked(query, key, value, q_len, scale)
        output[row.start : row.end] = result
    return output


def _grouped(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: AttentionGroup, scale: float
) -> torch.Tensor:
    """All rows of a group in one call, on views of their pages: [rows * q_len, heads, d]"""
    pages = slice(group.first_page, group.first_page + group.num_rows)
    key = k_cache[pages, : group.max_seq_len].transpose(1, 2)
    value = v_cache[pages, : group.max_seq_len].transpose(1, 2)
    return _unmasked(q[group.queries], key, value, group.q_len, scale, group.mask)


def _unmasked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_len: int,
    scale: float,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows whose queries all see the same keys. ``query``: [rows * q_len, heads, d]; ``key``, ``value``:
    [rows, kv_heads, keys, d]; ``padding``: see ``AttentionGroup.mask``.

    No mask between queries is needed, so the query heads of one KV head become further query rows: no key is
    repeated, and a decode row is one matrix product instead of many vector products.
    """
    folded = _fold(query, q_len, key.shape[1])
    result = F.scaled_dot_product_attention(folded, key, value, attn_mask=padding, scale=scale)
    return _unfold(result, q_len)


def paged_attention_with_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: CommonAttentionMetadata,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-causal attention and the natural log-sum-exp of its scores, float32 [tokens, heads] (-inf where a
    row has no keys), for ``merge_attention``. Raises ``ValueError`` for causal metadata."""
    if metadata.causal:
        raise ValueError("log-sum-exp is given for non-causal metadata only")
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for row in attention_rows(metadata, k_cache.shape[1]):
        if not row.seq_len or row.start == row.end:
            continue
        key, value = _keys(k_cache, row).float(), _keys(v_cache, row).float()
        q_len = row.end - row.start
        folded = _fold(q[row.start : row.end].float(), q_len, key.shape[1])[0]
        scores = folded @ key.permute(1, 2, 0) * scale
        result = torch.softmax(scores, dim=-1) @ value.transpose(0, 1)
        output[row.start : row.end] = _unfold(result[None], q_len).to(q.dtype)
        sums = torch.logsumexp(scores, dim=-1, keepdim=True)
        lse[row.start : row.end] = _unfold(sums[None], q_len)[..., 0]
    return output, lse


def _keys(cache: torch.Tensor, row: AttentionRow) -> torch.Tensor:
    """[seq_len, kv_heads, head_dim] of a row: a view when one page holds it."""
    begin, end = row.offset, row.offset + row.seq_len
    if len(row.pages) == 1:
        return cache[row.pages[0], begin:end]
    return cache[list(row.pages)].flatten(0, 1)[begin:end]


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    q_len, seq_len = query.shape[0], key.shape[0]
    mask = None
    if q_len != seq_len:
        mask = torch.ones(q_len, seq_len, dtype=torch.bool, device=query.device).tril(seq_len - q_len)
    result = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)


def _fold(query: torch.Tensor, q_len: int, kv_heads: int) -> torch.Tensor:
    """[rows * q_len, heads, d] -> [rows, kv_heads, q_len * heads / kv_heads, d]"""
    _, heads, head_dim = query.shape
    split = query.view(-1, q_len, kv_heads, heads // kv_heads, head_dim)
    return split.transpose(1, 2).reshape(len(split), kv_heads, -1, head_dim)


def _unfold(result: torch.Tensor, q_len: int) -> torch.Tensor:
    """The inverse of ``_fold``."""
    rows, kv_heads, queries, head_dim = result.shape
    split = result.view(rows, kv_heads, q_len, queries // q_len, head_dim)
    return split.transpose(1, 2).reshape(rows * q_len, -1, head_dim)
