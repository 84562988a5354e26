"""Known mistakes, put into the source one at a time: the same check that the right code passes must find each."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from attention_batch import CODE, PREFIXES, Batch, Code, worst

TOLERANCE = 1e-5
BLOCK, PAGE = 32, 16
ALL_KEYS = 10**6


@dataclass(frozen=True)
class Mutation:
    """``changes``: (text, other text) in the source of ``module``; each text must occur once."""

    module: str
    changes: tuple[tuple[str, str], ...]

    def apply(self) -> Code:
        original: ModuleType = getattr(CODE, self.module)
        source = inspect.getsource(original)
        for old, new in self.changes:
            assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times: adapt this mutation"
            source = source.replace(old, new)
        mutant = ModuleType(original.__name__)
        exec(compile(source, f"mutated {original.__file__}", "exec"), mutant.__dict__)
        return replace(CODE, **{self.module: mutant})


def two_chunks(code: Code) -> float:
    batch = Batch([p + BLOCK for p in PREFIXES], [BLOCK] * len(PREFIXES), PAGE)
    return worst(batch.two_chunks(PREFIXES, BLOCK, code), batch.dense(ALL_KEYS))


def fused(code: Code) -> float:
    """Prefill, denoising, commit + next, a short tail, and a query range that starts inside a block."""
    batch = Batch([96, 64, 128, 53, 96], [96, 32, 64, 21, 52], PAGE)
    return worst(batch.fused(BLOCK, code), batch.dense(BLOCK))


def whole_pages(code: Code) -> float:
    """A kernel that takes all pages of a prefix row up to the padding, as it may when prefixes end with a page."""
    prefixes = [16, 64, 32]
    batch = Batch([p + BLOCK for p in prefixes], [BLOCK] * 3, PAGE)
    prefix, _ = batch.chunks(prefixes, BLOCK, code)
    tables = prefix.block_table_tensor
    by_table = replace(prefix, seq_lens=((tables >= 0).sum(dim=1) * PAGE).int())
    got = CODE.sdpa.paged_attention(batch.q, batch.k_cache, batch.v_cache, by_table, batch.scale)
    expected = []
    for r, p in enumerate(prefixes):
        query = batch.q[r * BLOCK : (r + 1) * BLOCK].double()
        key, value = (part[r][:p].double().repeat_interleave(2, dim=1) for part in (batch.k, batch.v))
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", query, key) * batch.scale, dim=-1)
        expected.append(torch.einsum("hqk,khd->qhd", weights, value))
    return worst(got, torch.cat(expected))


CHECKS = {"two chunks": two_chunks, "fused": fused, "whole pages": whole_pages}

FUSED_END = "rows.requests).to(device)],\n        causal=False,"
MUTATIONS = {
    "summed instead of merged": (
        two_chunks,
        Mutation("merge", (("output_a * weight_a + output_b * weight_b", "output_a + output_b"),)),
    ),
    "averaged instead of merged": (
        two_chunks,
        Mutation("merge", (("output_a * weight_a + output_b * weight_b", "(output_a + output_b) / 2"),)),
    ),
    "base-2 log-sum-exp in a natural-log merge": (
        two_chunks,
        Mutation(
            "sdpa",
            (
                (
                    "torch.logsumexp(scores, dim=-1, keepdim=True)",
                    "torch.logsumexp(scores, dim=-1, keepdim=True) * 1.4426950408889634",
                ),
            ),
        ),
    ),
    "natural log-sum-exp in a base-2 merge": (
        two_chunks,
        Mutation("merge", (("torch.logaddexp(", "torch.logaddexp2("),)),
    ),
    "block starts at ceil(P / page)": (
        two_chunks,
        Mutation(
            "virtual_batch",
            (
                ("first = [prefix // page_size for", "first = [-(-prefix // page_size) for"),
                ("offsets = [prefix % page_size for", "offsets = [0 for"),
                # The published code has that many pages; with fewer the row would be refused.
                (
                    "last = [-(-(prefix + block_size) // page_size)",
                    "last = [-(-prefix // page_size) - (-block_size // page_size)",
                ),
            ),
        ),
    ),
    "first-key offset left out": (
        two_chunks,
        Mutation("virtual_batch", (("offsets = [prefix % page_size for", "offsets = [0 for"),)),
    ),
    "prefix cut to whole pages": (
        two_chunks,
        Mutation(
            "virtual_batch",
            (
                (
                    "_chunk(attn_metadata, prefixes, [0]",
                    "_chunk(attn_metadata, [p // page_size * page_size for p in prefixes], [0]",
                ),
            ),
        ),
    ),
    "one prefix for all requests": (
        two_chunks,
        Mutation(
            "virtual_batch",
            (
                (
                    "prefixes = _prefix_lengths(num_prefix_tokens, metadata.num_reqs)",
                    "prefixes = [num_prefix_tokens[0]] * metadata.num_reqs",
                ),
            ),
        ),
    ),
    "padded with page 0": (
        whole_pages,
        Mutation("virtual_batch", (("torch.where(inside, pages, -1)", "torch.where(inside, pages, 0)"),)),
    ),
    "causal": (
        fused,
        Mutation("virtual_batch", ((FUSED_END, FUSED_END.replace("False", "True")),)),
    ),
    "later blocks are seen": (
        fused,
        Mutation("virtual_batch", (("row_ends.astype(", "ends[requests].astype("),)),
    ),
    "blocks counted from the query's start": (
        fused,
        Mutation(
            "virtual_batch",
            (("(first[requests] + index) * block_length", "begins[requests] + index * block_length"),),
        ),
    ),
    "table row of another request": (
        fused,
        Mutation("virtual_batch", (("torch.from_numpy(rows.requests)", "torch.from_numpy(0 * rows.requests)"),)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_the_right_code_passes(check: str) -> None:
    assert CHECKS[check](CODE) <= TOLERANCE


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found(name: str) -> None:
    check, mutation = MUTATIONS[name]
    # NaN is found too.
    assert not check(mutation.apply()) <= 1000 * TOLERANCE


def test_base_2_log_sum_exp_is_as_wrong_as_known() -> None:
    """It is a quiet mistake: at a prefix of two blocks the error is some hundredths to tenths."""
    batch = Batch([96], [BLOCK], PAGE)
    wrong = batch.two_chunks([64], BLOCK, MUTATIONS["base-2 log-sum-exp in a natural-log merge"][1].apply())
    assert 0.01 < worst(wrong, batch.dense(BLOCK)) < 0.5


def test_causal_has_its_signature() -> None:
    """Wrong at the block's first position, right at its last, in every block."""
    batch = Batch([96], [96], PAGE)
    wrong = batch.fused(BLOCK, MUTATIONS["causal"][1].apply())
    error = (wrong - batch.dense(BLOCK)).abs().amax(dim=(1, 2)).view(3, BLOCK)
    assert (error[:, 0] > 1e-2).all()
    assert (error[:, -1] <= TOLERANCE).all()


def test_causal_chunks_are_refused() -> None:
    mutation = Mutation(
        "virtual_batch", (("causal=False,\n        **changes", "causal=True,\n        **changes"),)
    )
    with pytest.raises(ValueError, match="non-causal"):
        two_chunks(mutation.apply())


def test_a_block_that_lacks_its_first_page_is_refused() -> None:
    """Where the published code reads a page too few, the row is refused, not padded."""
    mutation = Mutation(
        "virtual_batch", (("first = [prefix // page_size for", "first = [-(-prefix // page_size) for"),)
    )
    with pytest.raises(ValueError, match="request 1: 32 keys from offset 1 need 3 pages"):
        two_chunks(mutation.apply())


def test_dense_is_no_stranger_to_the_check() -> None:
    """The reference itself, by the definition: k // B <= q // B, one query at a time."""
    batch = Batch([40], [40], PAGE)
    query, key, value = batch.q.double(), batch.k[0].double(), batch.v[0].double()
    for q in (0, 31, 32, 39):
        end = min(40, (q // BLOCK + 1) * BLOCK)
        weights = torch.softmax(query[q, 3] @ key[:end, 1].T * batch.scale, dim=-1)
        assert worst(batch.dense(BLOCK)[q, 3], weights @ value[:end, 1]) <= 1e-9
