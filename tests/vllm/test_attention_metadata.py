"""Virtual batches on vLLM's own ``CommonAttentionMetadata``, and what the plugin hands to vLLM's kernels."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

vllm_backend = pytest.importorskip("vllm.v1.attention.backend", reason="vllm is not installed")

from replicas.attention.virtual_batch import (  # noqa: E402
    make_block_attention_virtual_batches,
    make_block_causal_virtual_batches,
)

B, PAGE = 32, 16


def metadata(computed: list[int], query: list[int]):
    starts = torch.zeros(len(query) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query, dtype=torch.int32).cumsum(0)
    seq_lens = torch.tensor([c + q for c, q in zip(computed, query, strict=True)], dtype=torch.int32)
    pages = -(-int(seq_lens.max()) // PAGE) + 2
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(len(query) * pages, generator=generator).to(torch.int32).reshape(len(query), pages)
    return vllm_backend.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(query),
        num_actual_tokens=sum(query),
        max_query_len=max(query),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.arange(sum(query)),
        seq_lens_cpu_upper_bound=seq_lens,
        causal=True,
    )


def test_both_forms_take_vllm_s_class_and_leave_their_input():
    given = metadata([0, 32, 64], [32, 32, 32])
    prefix, block = make_block_attention_virtual_batches(given, [0, 32, 64], B, PAGE)
    assert type(prefix) is type(block) is type(given)
    assert prefix.seq_lens.tolist() == [0, 32, 64]
    assert block.seq_lens.tolist() == [B] * 3
    assert not prefix.causal
    assert block.block_table_tensor.tolist() == [
        given.block_table_tensor[0, 0:2].tolist(),
        given.block_table_tensor[1, 2:4].tolist(),
        given.block_table_tensor[2, 4:6].tolist(),
    ]
    fused = make_block_causal_virtual_batches(given, B)
    assert fused.seq_lens.tolist() == [32, 64, 96]
    assert given.causal
    assert given.seq_lens.tolist() == [32, 64, 96]
    # The prefix and the block of the two-chunk form are the keys of the fused one.
    assert fused.seq_lens.tolist() == (prefix.seq_lens + block.seq_lens).tolist()


@pytest.mark.parametrize(
    ("computed", "query"),
    [
        ([0], [170]),
        ([64], [64]),
        ([0, 96, 32, 160], [33, 64, 32, 7]),
        ([0, 0, 64], [1, 32, 96]),
    ],
)
def test_the_plugin_builds_what_the_transform_builds(monkeypatch, computed, query):
    from vllm.config.compilation import CUDAGraphMode

    from replicas.vllm_engine.plugin import state

    given = metadata(computed, query)
    expected = make_block_causal_virtual_batches(given, B)
    built = {}
    monkeypatch.setattr(state, "build_attn_metadata", lambda **arguments: built.update(arguments))
    plugin = SimpleNamespace(block_length=B, device=torch.device("cpu"))
    batch = SimpleNamespace(
        num_reqs=len(query),
        num_scheduled_tokens=np.array(query, dtype=np.int32),
        num_computed_tokens_np=np.array(computed, dtype=np.int32),
        num_tokens=sum(query),
    )
    state.BlockDiffusionState.prepare_attn(
        plugin, batch, CUDAGraphMode.NONE, (given.block_table_tensor,), given.slot_mapping, [], None
    )
    assert built["num_reqs"] == expected.num_reqs
    assert built["causal"] is expected.causal is False
    assert built["query_start_loc_cpu"].tolist() == expected.query_start_loc_cpu.tolist()
    assert built["query_start_loc_gpu"].tolist() == expected.query_start_loc.tolist()
    assert built["seq_lens"].tolist() == expected.seq_lens.tolist()
    assert (built["max_query_len"], built["max_seq_len"]) == (expected.max_query_len, expected.max_seq_len)
    assert built["block_tables"][0].tolist() == expected.block_table_tensor.tolist()
    assert built["num_tokens"] == expected.num_actual_tokens


@pytest.mark.parametrize(
    ("asked", "used"), [(None, "PIECEWISE"), ("FULL_AND_PIECEWISE", "PIECEWISE"), ("NONE", "NONE")]
)
def test_no_graph_holds_attention(asked, used):
    """A step's rows of attention are blocks, of which there may be more than a full graph has room for."""
    from vllm.config import CUDAGraphMode

    from replicas.vllm_engine.plugin.vllm_config import BlockDiffusionConfig

    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(canvas_length=B), max_model_len=4 * B),
        attention_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=B),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(block_size=B),
        compilation_config=SimpleNamespace(cudagraph_mode=asked and CUDAGraphMode[asked]),
    )
    BlockDiffusionConfig.verify_and_update_config(config)
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode[used]
