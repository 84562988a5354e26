"""Rows of KV slots that one call serves: the same numbers as row by row."""

from __future__ import annotations

import pytest
import torch

from replicas.attention.metadata import CommonAttentionMetadata, attention_plan
from replicas.attention.sdpa import paged_attention
from replicas.attention.virtual_batch import make_block_causal_virtual_batches

SLOTS, LENGTH, KV_HEADS, HEADS, DIM = 8, 256, 2, 6, 16


def metadata_of(rows: list[tuple[int, int, int]], causal: bool) -> CommonAttentionMetadata:
    """From (slot, query tokens, keys)."""
    starts = torch.tensor([0, *(q for _, q, _ in rows)], dtype=torch.int32).cumsum(0).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([keys for _, _, keys in rows], dtype=torch.int32),
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(q for _, q, _ in rows),
        max_seq_len=max(keys for _, _, keys in rows),
        block_table_tensor=torch.tensor([[slot] for slot, _, _ in rows], dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        causal=causal,
    )


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: CommonAttentionMetadata
) -> torch.Tensor:
    """Each row alone, softmax written out."""
    output = torch.empty_like(q)
    starts = metadata.query_start_loc_cpu.tolist()
    for r, keys in enumerate(metadata.seq_lens.tolist()):
        slot = int(metadata.block_table_tensor[r, 0])
        key = k[slot, :keys].repeat_interleave(HEADS // KV_HEADS, dim=1)
        value = v[slot, :keys].repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[starts[r] : starts[r + 1]], key) * DIM**-0.5
        output[starts[r] : starts[r + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return output


CASES = {
    "decoding rows in slot order": ([(0, 1, 100), (1, 1, 110), (2, 1, 105)], True, 1, 0),
    "in another order": ([(2, 1, 100), (0, 1, 110), (1, 1, 105)], True, 1, 0),
    "equal lengths need no mask": ([(3, 1, 64), (4, 1, 64)], True, 1, 0),
    "a gap splits": ([(0, 1, 90), (1, 1, 91), (4, 1, 90), (5, 1, 92), (7, 1, 90)], True, 2, 1),
    "a far longer row stays alone": ([(0, 1, 20), (1, 1, 250), (2, 1, 240)], True, 1, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_of_decoding_rows_equal_dense_attention(case: str) -> None:
    rows, causal, groups, single = CASES[case]
    metadata = metadata_of(rows, causal)
    plan = attention_plan(metadata, LENGTH, torch.float32, torch.device("cpu"))
    assert (len(plan.groups), len(plan.rows)) == (groups, single)
    check(metadata)


def test_groups_of_blocks_equal_dense_attention() -> None:
    """Four requests, each with the block before and the block in denoising."""
    rows = [(1, 64, 128), (0, 64, 160), (3, 32, 128), (2, 64, 128)]
    metadata = make_block_causal_virtual_batches(metadata_of(rows, causal=False), 32)
    plan = attention_plan(metadata, LENGTH, torch.float32, torch.device("cpu"))
    assert sum(group.num_rows for group in plan.groups) + len(plan.rows) == 7
    assert sum(group.num_rows for group in plan.groups) >= 6
    check(metadata)


def test_prefill_rows_are_left_out() -> None:
    metadata = metadata_of([(0, 1, 40), (1, 1, 41), (2, 30, 30)], causal=True)
    plan = attention_plan(metadata, LENGTH, torch.float32, torch.device("cpu"))
    assert [row.pages for row in plan.rows] == [(2,)]
    assert len(plan.groups) == 1


def test_float16_is_not_grouped() -> None:
    metadata = metadata_of([(0, 1, 40), (1, 1, 41)], causal=True)
    assert not attention_plan(metadata, LENGTH, torch.float16, torch.device("cpu")).groups


def check(metadata: CommonAttentionMetadata) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(metadata.num_actual_tokens, HEADS, DIM, generator=generator)
    # Keys past the end of a row are junk, large enough to show in any sum.
    k, v = (100 * torch.randn(SLOTS, LENGTH, KV_HEADS, DIM, generator=generator) for _ in range(2))
    for r, keys in enumerate(metadata.seq_lens.tolist()):
        slot = int(metadata.block_table_tensor[r, 0])
        k[slot, :keys] /= 100
        v[slot, :keys] /= 100
    expected = dense(q, k, v, metadata)
    assert (
        paged_attention(q, k, v, metadata, DIM**-0.5) - expected
    ).abs().max() <= 1e-5 * expected.abs().max()
