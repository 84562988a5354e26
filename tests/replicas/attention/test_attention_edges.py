"""Batches at the edge: rows without queries, rows that no form can describe, caches of other classes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
from attention_batch import Batch, metadata, worst

from replicas.attention.metadata import CommonAttentionMetadata
from replicas.attention.sdpa import paged_attention, paged_attention_with_lse
from replicas.attention.virtual_batch import (
    make_block_attention_virtual_batches,
    make_block_causal_virtual_batches,
)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_without_queries_changes_nothing(causal: bool) -> None:
    """Padded batches have such rows, with keys and without."""
    batch = Batch([40, 20, 33], [8, 0, 9], 16)
    batch.md.causal = causal
    got = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.md, batch.scale)
    assert worst(got, batch.dense(1 if causal else 10**6)) <= 1e-5
    if not causal:
        output, lse = paged_attention_with_lse(batch.q, batch.k_cache, batch.v_cache, batch.md, batch.scale)
        assert worst(output, got) <= 1e-6
        assert lse.isfinite().all()


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="request 1: 8 query tokens, but `seq_lens` has 3 keys only"):
        make_block_causal_virtual_batches(metadata([40, 3], [[1, 2, 3], [4, 5, 6]], [8, 8]), 32)


def test_more_than_one_block_of_queries_is_refused_by_the_two_chunk_form() -> None:
    """It would let the second block's queries see the first block only."""
    md = metadata([48, 96], [[1, 2, 3, -1, -1, -1], [4, 5, 6, 7, 8, 9]], [32, 64])
    with pytest.raises(ValueError, match="request 1: 64 query tokens do not fit one block of 32"):
        make_block_attention_virtual_batches(md, [16, 32], 32, 16)
    assert make_block_causal_virtual_batches(md, 32).num_reqs == 4, "16 to 32, 32 to 48, and two blocks"


@dataclass
class WithCaches(CommonAttentionMetadata):
    """vLLM's class keeps what it has once derived from ``seq_lens`` in private fields."""

    seq_lens_cpu_upper_bound: Any = None
    _seq_lens_cpu: Any = None
    _num_computed_tokens_cpu: Any = None
    _num_computed_tokens_cache: Any = None


CACHES = [f.name for f in fields(WithCaches) if f.name not in CommonAttentionMetadata.__dataclass_fields__]


def test_what_was_derived_from_seq_lens_does_not_survive() -> None:
    plain = metadata([48], [[1, 2, 3]])
    values = {f.name: getattr(plain, f.name) for f in fields(plain)}
    md = WithCaches(**values, **{name: plain.seq_lens.clone() for name in CACHES})
    prefix, block = make_block_attention_virtual_batches(md, 16, 32, 16)
    assert prefix is not None
    for changed in (prefix, block, make_block_causal_virtual_batches(md, 32)):
        assert [getattr(changed, name) for name in CACHES] == [None] * 4
    assert all(getattr(md, name) is not None for name in CACHES), "the input keeps its own"
