"""numpy in place of the Triton kernels that vLLM's second model runner launches around a diffusion model.

vLLM lets a platform replace kernels (``vllm.triton_utils.dispatcher``). Each function has the parameters of the kernel
that it replaces; launch grids are not passed on, so sizes come from the tensors. Context parallelism is not covered.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

_GPU = "vllm.v1.worker.gpu"
_registered = False


def register_cpu_kernels() -> None:
    """Once per process, and only where there is no Triton. Called in workers, which import the runner before."""
    global _registered
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON, triton

    if _registered or HAS_TRITON or not current_platform.is_cpu():
        return
    import vllm.v1.worker.cpu.shm  # noqa: F401  (replaces CUDA's streams; must come before the runner's modules)
    from vllm.triton_utils.dispatcher import register_kernels

    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = lambda n: 1 << max(0, int(n) - 1).bit_length()
    register_kernels(
        {
            f"{_GPU}.buffer_utils._apply_write_kernel": apply_write,
            f"{_GPU}.block_table._gather_block_tables_kernel": gather_block_tables,
            f"{_GPU}.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
            f"{_GPU}.input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
            f"{_GPU}.input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
            f"{_GPU}.input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
            f"{_GPU}.input_batch._post_update_kernel": post_update,
            f"{_GPU}.input_batch._post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
            f"{_GPU}.input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
        }
    )
    _registered = True


def apply_write(
    output: torch.Tensor,
    output_stride: Any,
    write_indices: torch.Tensor,
    write_starts: torch.Tensor,
    write_contents: torch.Tensor,
    write_cu_lens: torch.Tensor,
    write_group_ids: torch.Tensor | None,
    BLOCK_SIZE: int = 0,
    MULTI_GROUP: bool = False,
    **_: Any,
) -> None:
    """Writes pieces of ``write_contents`` into rows of ``output`` (or of several tensors, given by address)."""
    contents = write_contents.numpy()
    begin = 0
    for i, (row, start, end) in enumerate(
        zip(write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist(), strict=True)
    ):
        piece = contents[begin:end]
        if MULTI_GROUP:
            assert write_group_ids is not None
            group = int(write_group_ids[i])
            stride = int(output_stride[group])
            address = int(output[group]) + 4 * (row * stride + start)
            _int32_at(address, len(piece))[:] = piece
        elif output.dim() == 1:
            output.numpy()[row * output_stride + start :][: len(piece)] = piece
        else:
            output.numpy()[row, start : start + len(piece)] = piece
        begin = end


def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int = 0,
    **_: Any,
) -> None:
    """Copies the block-table rows of a batch, of each KV cache group, to the batch's order."""
    requests = batch_idx_to_req_idx.tolist()
    for group, stride in enumerate(block_table_strides.tolist()):
        source, target = int(src_block_table_ptrs[group]), int(dst_block_table_ptrs[group])
        counts = num_blocks[group].tolist()
        for row, request in enumerate(requests[:num_reqs]):
            count = counts[request]
            _int32_at(target + 4 * row * stride, count)[:] = _int32_at(source + 4 * request * stride, count)


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int = 1,
    CP_INTERLEAVE: int = 1,
    PAD_ID: int = -1,
    TRITON_BLOCK_SIZE: int = 0,
    **_: Any,
) -> None:
    """Where each token's key and value are written: page * page size + offset."""
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism on a CPU")
    requests, positions, num_tokens = _flat(idx_mapping, query_start_loc, pos)
    for group, stride in enumerate(block_table_strides.tolist()):
        out = slot_mappings[group].numpy()
        out[num_tokens:max_num_tokens] = PAD_ID
        if not bool(slot_mapping_enabled[group]):
            out[:num_tokens] = PAD_ID
            continue
        size = int(block_sizes[group])
        rows = int(requests.max(initial=0)) + 1
        table = _int32_at(int(block_table_ptrs[group]), rows * stride).reshape(rows, stride)
        known = requests >= 0
        pages = table[np.where(known, requests, 0), np.where(known, positions // size, 0)].astype(np.int64)
        out[:num_tokens] = np.where(known, pages * size + positions % size, PAD_ID)


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    BLOCK_SIZE: int = 0,
    LOOKAHEAD_BLOCK: int = 0,
    **_: Any,
) -> None:
    """Token ids of requests that are in their prompt; what follows the query is only for multi-token prediction."""
    starts = query_start_loc.tolist()
    ids, tokens = input_ids.numpy(), all_token_ids.numpy()
    for row, request in enumerate(idx_mapping.tolist()):
        computed, prefill = int(num_computed_tokens[request]), int(prefill_lens[request])
        if computed >= prefill:
            continue
        length = starts[row + 1] - starts[row]
        piece = tokens[request, computed : computed + length]
        ids[starts[row] : starts[row] + len(piece)] = piece
        for i in range(num_lookahead):
            at = computed + length + i
            next_prefill_tokens[i, request] = int(tokens[request, at]) if at < prefill else 0


def prepare_pos_seq_lens(
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int = 0,
    **_: Any,
) -> None:
    """Positions of the step's tokens, and lengths of its requests."""
    requests = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(requests) + 1].astype(np.int64)
    lengths = np.diff(starts)
    computed = num_computed_tokens.numpy()[requests]
    lens = seq_lens.numpy()
    lens[: len(requests)] = computed + lengths
    lens[len(requests) :] = 0
    local = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    pos.numpy()[: starts[-1]] = np.repeat(computed, lengths) + local


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    BLOCK_SIZE: int = 0,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: Any,
) -> None:
    """Which hidden states become logits (the last ones of each query). The drafts' token ids are ours to write."""
    ends = query_start_loc.tolist()[1:]
    bounds = cu_num_logits.tolist()
    out = logits_indices.numpy()
    for row in range(idx_mapping.shape[0]):
        count = bounds[row + 1] - bounds[row]
        out[bounds[row] : bounds[row + 1]] = np.arange(ends[row] - count, ends[row])


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    total_len: torch.Tensor,
    **_: Any,
) -> None:
    """Appends a step's tokens to their requests, and counts what was computed."""
    sampled, tokens, lengths = sampled_tokens.numpy(), all_token_ids.numpy(), total_len.numpy()
    starts = None if query_start_loc is None else query_start_loc.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        if request < 0:
            continue
        count = int(num_sampled[row])
        if count > 0:
            begin = int(lengths[request])
            tokens[request, begin : begin + count] = sampled[row, :count]
            lengths[request] = begin + count
            last_sampled_tokens[request, 0] = int(sampled[row, count - 1])
            if output_bin_counts is not None:
                np.add.at(output_bin_counts[request].numpy(), sampled[row, :count], 1)
        query = 0 if starts is None else starts[row + 1] - starts[row]
        num_computed_tokens[request] += query - int(num_rejected[row])


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> None:
    """Counts a step's tokens as computed."""
    requests = idx_mapping.numpy()
    lengths = np.diff(query_start_loc.numpy()[: len(requests) + 1])
    num_computed_tokens.numpy()[requests] += lengths


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
    BLOCK_SIZE: int = 0,
    **_: Any,
) -> None:
    """For each logits row its request, and its place among that request's rows."""
    starts = cu_num_logits.numpy().astype(np.int64)
    counts = np.diff(starts)
    expanded_idx_mapping.numpy()[:] = np.repeat(idx_mapping.numpy(), counts)
    expanded_local_pos.numpy()[:] = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def _flat(
    idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, pos: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, int]:
    """(Request, position) of each token of the step, and how many tokens there are."""
    requests = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(requests) + 1].astype(np.int64)
    num_tokens = int(starts[-1])
    return np.repeat(requests, np.diff(starts)).astype(np.int64), pos.numpy()[:num_tokens], num_tokens


def _int32_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))
