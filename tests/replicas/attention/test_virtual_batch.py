"""Cutting requests into virtual requests: exact tables, and numbers against dense masked attention."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from attention_batch import PREFIXES, Batch, metadata, same, worst

from replicas.attention.merge import merge_attention
from replicas.attention.metadata import CommonAttentionMetadata
from replicas.attention.sdpa import paged_attention, paged_attention_with_lse
from replicas.attention.virtual_batch import (
    make_block_attention_virtual_batches,
    make_block_causal_virtual_batches,
)

PAGE, BLOCK = 16, 32

# Exact tables


def test_prefixes_of_four_requests() -> None:
    tables = [[100, 101, -1, -1, -1], [10, 20, 21, -1, -1], [30, 40, 50, 51, -1], [60, 70, 80, 90, 91]]
    md = metadata([32, 48, 64, 80], tables)
    before = copy.deepcopy(md)
    prefix, block = make_block_attention_virtual_batches(md, [0, 16, 32, 48], BLOCK, PAGE)
    assert prefix is not None
    assert prefix.block_table_tensor.tolist() == [[-1, -1, -1], [10, -1, -1], [30, 40, -1], [60, 70, 80]]
    assert block.block_table_tensor.tolist() == [[100, 101], [20, 21], [50, 51], [90, 91]]
    assert prefix.seq_lens.tolist() == [0, 16, 32, 48]
    assert prefix.max_seq_len == 48
    assert block.seq_lens.tolist() == [32] * 4
    assert block.max_seq_len == 32
    for part in (prefix, block):
        assert part.causal is False
        assert part.num_reqs == 4
        assert torch.equal(part.query_start_loc, md.query_start_loc)
        assert torch.equal(part.slot_mapping, md.slot_mapping)
    assert same(md, before), "the input must not be changed"


def test_zero_is_a_valid_page() -> None:
    md = metadata([32, 64], [[100, 101, -1, -1], [0, 1, 2, 3]])
    prefix, block = make_block_attention_virtual_batches(md, [0, 32], BLOCK, PAGE)
    assert prefix is not None
    assert prefix.block_table_tensor.tolist() == [[-1, -1], [0, 1]]
    assert block.block_table_tensor.tolist() == [[100, 101], [2, 3]]


def test_without_any_prefix() -> None:
    md = metadata([32, 32], [[100, 101], [200, 201]])
    prefix, block = make_block_attention_virtual_batches(md, [0, 0], BLOCK, PAGE)
    assert prefix is None
    assert block.block_table_tensor.tolist() == [[100, 101], [200, 201]]


def test_query_start_loc_is_kept() -> None:
    md = metadata([48, 80], [[1, 2, 3, -1, -1], [4, 5, 6, 7, 8]])
    prefix, block = make_block_attention_virtual_batches(md, [16, 48], BLOCK, PAGE)
    assert prefix is not None
    assert prefix.query_start_loc.tolist() == block.query_start_loc.tolist() == [0, 32, 64]


def test_an_int_is_the_list_of_one() -> None:
    md = metadata([48], [[1, 2, 3]])
    for a, b in zip(
        make_block_attention_virtual_batches(md, 16, BLOCK, PAGE),
        make_block_attention_virtual_batches(md, [16], BLOCK, PAGE),
        strict=True,
    ):
        assert a is not None
        assert b is not None
        assert same(a, b)
    assert a is not None
    assert a.block_table_tensor.tolist() == [[2, 3]]


def test_a_block_that_starts_inside_a_page() -> None:
    md = metadata([48, 56], [[1, 2, 3, -1], [5, 6, 7, 8]])
    _, block = make_block_attention_virtual_batches(md, [16, 24], BLOCK, PAGE)
    assert block.block_table_tensor.tolist() == [[2, 3, -1], [6, 7, 8]]
    assert block.first_key_offset is not None
    assert block.first_key_offset.tolist() == [0, 8]
    fused = make_block_causal_virtual_batches(metadata([56], [[5, 6, 7, 8]]), 8)
    assert fused.block_table_tensor.tolist() == [[5, 6, 7, 8]] * 4
    assert fused.seq_lens.tolist() == [32, 40, 48, 56]


def test_a_small_block_needs_one_page_only() -> None:
    md = metadata([12], [[7]], [8])
    _, block = make_block_attention_virtual_batches(md, [4], 8, PAGE)
    assert block.block_table_tensor.tolist() == [[7]]
    assert block.first_key_offset is not None
    assert block.first_key_offset.tolist() == [4]


@dataclass
class WithoutOffset:
    """The fields of vLLM's class: it cannot describe a range that starts inside a page."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: bool = True
    _seq_lens_cpu: Any = None


def foreign(md: CommonAttentionMetadata) -> WithoutOffset:
    names = {f.name for f in fields(WithoutOffset)}
    values = {f.name: getattr(md, f.name) for f in fields(md) if f.name in names}
    return WithoutOffset(**values, _seq_lens_cpu=md.seq_lens.clone())


def test_a_foreign_class_refuses_a_block_inside_a_page() -> None:
    with pytest.raises(ValueError, match=r"request 1: `num_prefix_tokens` 24 .* page size 16"):
        make_block_attention_virtual_batches(
            foreign(metadata([48, 56], [[1, 2, 3, 0], [5, 6, 7, 8]])), [16, 24], BLOCK, PAGE
        )


def test_cached_copies_of_seq_lens_do_not_survive() -> None:
    md = foreign(metadata([48], [[1, 2, 3]]))
    prefix, block = make_block_attention_virtual_batches(md, 16, BLOCK, PAGE)
    fused = make_block_causal_virtual_batches(md, BLOCK)
    assert prefix is not None
    assert prefix._seq_lens_cpu is block._seq_lens_cpu is fused._seq_lens_cpu is None
    assert md._seq_lens_cpu is not None


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([0, 16], r"2 entries.* 3 requests"),
        (16, r"one number \(16\).* 3 requests"),
        (True, "integer"),
        ([0, 16, True], r"num_prefix_tokens\[2\]` must be an integer"),
        (-1, "at least 0, got -1"),
        ([0, -16, 0], r"num_prefix_tokens\[1\].*got -16"),
        (16.0, "got 16.0"),
        ([0, 16.5, 0], "got 16.5"),
        (None, "got None"),
    ],
)
def test_wrong_prefixes_are_named(prefixes: Any, message: str) -> None:
    md = metadata([48] * 3, [[1, 2, 3]] * 3)
    with pytest.raises(ValueError, match=message):
        make_block_attention_virtual_batches(md, prefixes, BLOCK, PAGE)


def test_missing_pages_are_named() -> None:
    md = metadata([64, 80], [[1, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(ValueError, match=r"request 1: .*pages \[3:5\].* 4 columns"):
        make_block_attention_virtual_batches(md, [32, 48], BLOCK, PAGE)


@pytest.mark.parametrize("size", [0, -16, 16.0, True, None])
def test_wrong_sizes_are_named(size: Any) -> None:
    md = metadata([48], [[1, 2, 3]])
    with pytest.raises(ValueError, match="`block_size` must be an integer of at least 1"):
        make_block_attention_virtual_batches(md, 16, size, PAGE)
    with pytest.raises(ValueError, match="`page_size` must be an integer of at least 1"):
        make_block_attention_virtual_batches(md, 16, BLOCK, size)


@pytest.mark.parametrize("block_length", [0, -8, 8.0, True])
def test_wrong_block_lengths_are_named(block_length: Any) -> None:
    with pytest.raises(ValueError, match="block_length"):
        make_block_causal_virtual_batches(metadata([32], [[1, 2]]), block_length)


# Numbers


@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize("block", [8, 32])
def test_both_forms_against_dense(page: int, block: int) -> None:
    """Two chunks: the block starts wherever the prefix ends. Fused: blocks lie at multiples of ``block``."""
    batch = Batch([p + block for p in PREFIXES], [block] * len(PREFIXES), page)
    # A dense mask that puts the border at the prefix: every query sees all keys.
    assert worst(batch.two_chunks(PREFIXES, block), batch.dense(10**6)) <= 1e-5
    assert worst(batch.fused(block), batch.dense(block)) <= 1e-5
    aligned = [p // block * block for p in PREFIXES]
    batch = Batch([p + block for p in aligned], [block] * len(aligned), page)
    assert worst(batch.two_chunks(aligned, block), batch.fused(block)) <= 1e-6
    assert worst(batch.fused(block), batch.dense(block)) <= 1e-5


@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize("block", [8, 32])
def test_bfloat16_against_dense(page: int, block: int) -> None:
    """Against the exact result for the same rounded inputs; the tokens' values are of order 1."""
    batch = Batch([p + block for p in PREFIXES], [block] * len(PREFIXES), page, dtype=torch.bfloat16)
    assert worst(batch.fused(block), batch.dense(block)) < 0.01
    assert worst(batch.two_chunks(PREFIXES, block), batch.dense(10**6)) < 0.01


@pytest.mark.parametrize("count", [1, 2, 4, 8, 32])
def test_mixed_phases_in_one_call(count: int) -> None:
    """Prefill chunks, denoising blocks, commit + next block pairs and a short tail, by turns."""
    shapes = [(96, 96), (64, 32), (128, 64), (53, 21), (32, 32)]
    seq_lens, query_lens = zip(*(shapes[i % len(shapes)] for i in range(count)), strict=True)
    batch = Batch(list(seq_lens), list(query_lens), 16, seed=count)
    assert worst(batch.fused(32), batch.dense(32)) <= 1e-5


@pytest.mark.parametrize("count", [1, 2, 4, 8, 32])
def test_two_chunks_of_many_requests(count: int) -> None:
    prefixes = [PREFIXES[i % len(PREFIXES)] for i in range(count)]
    batch = Batch([p + 32 for p in prefixes], [32] * count, 16, seed=count)
    assert worst(batch.two_chunks(prefixes, 32), batch.dense(10**6)) <= 1e-5


def test_slots_are_pages_of_the_whole_context() -> None:
    batch = Batch([96, 40, 7], [64, 8, 7], 128)
    assert worst(batch.fused(32), batch.dense(32)) <= 1e-5


def test_causal_rows_against_dense() -> None:
    batch = Batch([50, 33, 9, 1], [17, 1, 9, 1], 16)
    out = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.md, batch.scale)
    assert worst(out, batch.dense(1)) <= 1e-5


def test_permuting_requests_permutes_outputs() -> None:
    shapes = [(96, 64), (64, 32), (53, 21)]
    batch = Batch([s for s, _ in shapes], [q for _, q in shapes], 16)
    order = [2, 0, 1]
    pieces = torch.split(batch.q, batch.query_lens)
    permuted = metadata(
        [batch.seq_lens[i] for i in order],
        [batch.tables[i] for i in order],
        [batch.query_lens[i] for i in order],
    )
    out = paged_attention(
        torch.cat([pieces[i] for i in order]),
        batch.k_cache,
        batch.v_cache,
        make_block_causal_virtual_batches(permuted, 32),
        batch.scale,
    )
    expected = torch.split(batch.fused(32), batch.query_lens)
    assert worst(out, torch.cat([expected[i] for i in order])) <= 1e-6
    alone = paged_attention(
        pieces[1],
        batch.k_cache,
        batch.v_cache,
        make_block_causal_virtual_batches(metadata([64], [batch.tables[1]], [32]), 32),
        batch.scale,
    )
    assert worst(alone, expected[1]) <= 1e-6


def test_what_a_key_can_change() -> None:
    batch = Batch([96], [96], 16)
    before = batch.fused(32)

    def changed_by(position: int) -> list[int]:
        page, offset = batch.tables[0][position // 16], position % 16
        batch.v_cache[page, offset] += 1
        difference = (batch.fused(32) - before).abs().amax(dim=(1, 2))
        batch.v_cache[page, offset] -= 1
        return (difference > 1e-4).nonzero().flatten().tolist()

    assert changed_by(63)[0] == 32, "the last key of a block is seen by its first query"
    assert changed_by(64)[0] == 64, "a later block changes nothing earlier"


def test_a_row_padded_with_minus_one_that_is_needed_is_refused() -> None:
    batch = Batch([64], [32], 16)
    tables = batch.md.block_table_tensor.clone()
    tables[0, 2] = -1
    with pytest.raises(ValueError, match="request 0: 64 keys"):
        paged_attention(
            batch.q, batch.k_cache, batch.v_cache, replace(batch.md, block_table_tensor=tables), batch.scale
        )


# Merging


def test_merging_empty_parts() -> None:
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    nothing, none = torch.zeros(3, 2, 4), torch.full((3, 2), float("-inf"))
    merged, merged_lse = merge_attention(nothing, none, out, lse)
    assert worst(merged, out) <= 1e-6
    assert worst(merged_lse, lse) <= 1e-6
    both, both_lse = merge_attention(nothing, none, nothing, none)
    assert torch.equal(both, nothing)
    assert torch.isneginf(both_lse).all()


def test_lse_of_causal_metadata_is_refused() -> None:
    batch = Batch([64], [32], 16)
    with pytest.raises(ValueError, match="non-causal"):
        paged_attention_with_lse(batch.q, batch.k_cache, batch.v_cache, batch.md, batch.scale)
