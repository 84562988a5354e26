"""Batches of requests in shuffled pages, and what dense masked attention makes of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch

from replicas.attention import merge, sdpa, virtual_batch
from replicas.attention.metadata import CommonAttentionMetadata

PREFIXES = [0, 1, 15, 16, 17, 24, 31, 32, 33, 48, 64, 100]


@dataclass(frozen=True)
class Code:
    """The modules under test; a mutation replaces one of them."""

    virtual_batch: Any = virtual_batch
    sdpa: Any = sdpa
    merge: Any = merge


CODE = Code()


def metadata(
    seq_lens: list[int], tables: list[list[int]], query_lens: list[int] | None = None
) -> CommonAttentionMetadata:
    query_lens = query_lens or [32] * len(seq_lens)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.arange(sum(query_lens)),
    )


def same(a: CommonAttentionMetadata, b: CommonAttentionMetadata) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


class Batch:
    """Requests with random keys in shuffled pages full of junk; queries are the last ``query_lens`` tokens."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        page: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.page, self.scale = page, dim**-0.5
        columns = max(-(-s // page) for s in seq_lens) + 1
        num_pages = columns * len(seq_lens) + 1
        order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(columns)] for _ in seq_lens]
        # Page 0 is in no table; large values there would show a row padded with 0.
        self.k_cache, self.v_cache = (random(num_pages, page, kv_heads, dim) for _ in range(2))
        self.v_cache[0] = 100
        self.k, self.v = [], []
        for table, seq_len in zip(self.tables, seq_lens, strict=True):
            self.k.append(random(seq_len, kv_heads, dim))
            self.v.append(random(seq_len, kv_heads, dim))
            for cache, values in ((self.k_cache, self.k[-1]), (self.v_cache, self.v[-1])):
                for i in range(seq_len):
                    cache[table[i // page], i % page] = values[i]
        self.q = random(sum(query_lens), heads, dim)
        self.md = metadata(seq_lens, self.tables, query_lens)
        self.seq_lens, self.query_lens = seq_lens, query_lens

    def dense(self, block: int) -> torch.Tensor:
        """Masked attention in float64, request by request."""
        outputs, start = [], 0
        for k, v, seq_len, q_len in zip(self.k, self.v, self.seq_lens, self.query_lens, strict=True):
            q = self.q[start : start + q_len].double().transpose(0, 1)
            groups = q.shape[0] // k.shape[1]
            keys = k.double().transpose(0, 1).repeat_interleave(groups, 0)
            values = v.double().transpose(0, 1).repeat_interleave(groups, 0)
            positions = torch.arange(seq_len - q_len, seq_len)
            visible = torch.arange(seq_len)[None] // block <= positions[:, None] // block
            scores = (q @ keys.transpose(1, 2) * self.scale).masked_fill(~visible, float("-inf"))
            outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
            start += q_len
        return torch.cat(outputs)

    def fused(self, block: int, code: Code = CODE) -> torch.Tensor:
        before = copy.deepcopy(self.md)
        md = code.virtual_batch.make_block_causal_virtual_batches(self.md, block)
        assert same(self.md, before), "the input must not be changed"
        return code.sdpa.paged_attention(self.q, self.k_cache, self.v_cache, md, self.scale)

    def chunks(self, prefixes: list[int], block: int, code: Code = CODE) -> list[CommonAttentionMetadata]:
        """Prefix (if there is one) and block."""
        before = copy.deepcopy(self.md)
        chunks = code.virtual_batch.make_block_attention_virtual_batches(self.md, prefixes, block, self.page)
        assert same(self.md, before), "the input must not be changed"
        return [chunk for chunk in chunks if chunk is not None]

    def two_chunks(self, prefixes: list[int], block: int, code: Code = CODE) -> torch.Tensor:
        parts = [
            code.sdpa.paged_attention_with_lse(self.q, self.k_cache, self.v_cache, chunk, self.scale)
            for chunk in self.chunks(prefixes, block, code)
        ]
        return code.merge.merge_attention(*parts[0], *parts[1])[0] if len(parts) == 2 else parts[0][0]


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
