"""vLLM's ``ModelState`` for LLaDA2: what a step computes for each request, and who attends to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.model_states.interface import ModelState

from replicas.attention.virtual_batch import block_causal_rows
from replicas.vllm_engine.plugin.canvas import Canvases, CanvasParams
from replicas.vllm_engine.plugin.sampler import BlockDiffusionSampler


@dataclass(frozen=True)
class StepPlan:
    """A step on the host. ``slots``, ``ends`` int64 [num_reqs]: request indices, and positions after what is computed.
    ``denoising`` int64 [R]: batch rows that compute a canvas; ``wanted`` bool [R, B]: canvas positions whose logits are
    needed; ``logits`` int64 or None: which of vLLM's logits rows those are (None is all of them)."""

    num_reqs: int
    slots: np.ndarray
    ends: np.ndarray
    denoising: np.ndarray
    wanted: np.ndarray
    logits: np.ndarray | None


class BlockDiffusionState(ModelState):
    """Canvases are vLLM's "draft tokens", and nothing is sampled beside them.

    A step computes [prompt chunk], or [canvas], or [finished block, canvas]: a finished block is emitted at once, but
    its keys and values become final in the next canvas' first forward (``BlockDiffusionScheduler``).
    """

    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        config = self.model_config.hf_config
        self.block_length = int(vllm_config.diffusion_config.canvas_length)
        self.canvases = Canvases(self.max_num_reqs, self.block_length, int(config.mask_token_id))
        self.plan: StepPlan | None = None

    def get_supported_generation_tasks(self) -> tuple[Any, ...]:
        return ("generate",)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        return BlockDiffusionSampler(self.canvases, self), None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        if new_req_data.sampling_params is None or new_req_data.prefill_token_ids is None:
            return
        params = CanvasParams.from_vllm(new_req_data.sampling_params)
        self.canvases.add(req_index, new_req_data.prefill_token_ids, new_req_data.prompt_len, params)

    def prepare_inputs_embeds(self, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {}

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Plans the step, and writes the token ids that only we know: canvases, and finished blocks before them."""
        self.plan = plan = self._plan(input_batch, req_states)
        self.model.logits_rows = None
        if plan is None:
            return {}
        if plan.logits is not None:
            self.model.logits_rows = torch.from_numpy(plan.logits).to(self.device)
        index, ids = self._token_ids(input_batch, plan)
        if len(index):
            device = input_batch.input_ids.device
            input_batch.input_ids[torch.from_numpy(index).to(device)] = torch.from_numpy(ids).to(
                device, input_batch.input_ids.dtype
            )
        return {}

    def _plan(self, batch: Any, req_states: Any) -> StepPlan | None:
        num_reqs, canvases = batch.num_reqs, self.canvases
        known = req_states.req_id_to_index
        if any(req_id not in known for req_id in batch.req_ids):
            return None  # a dummy batch
        slots = batch.idx_mapping_np[:num_reqs].astype(np.int64)
        ends = (batch.num_computed_tokens_np + batch.num_scheduled_tokens)[:num_reqs].astype(np.int64)
        drafts = batch.num_draft_tokens_per_req
        if drafts is None:
            drafts = np.zeros(num_reqs, dtype=np.int64)
        complete = (drafts == self.block_length - canvases.first[slots]) & (
            ends == canvases.start[slots] + self.block_length
        )
        denoising = np.flatnonzero(complete)
        wanted = canvases.undecided(slots[denoising])
        offsets = batch.cu_num_logits_np[:-1][denoising] - canvases.first[slots[denoising]]
        row, column = np.nonzero(wanted)
        logits = offsets[row] + column
        total = int(batch.cu_num_logits_np[num_reqs])
        return StepPlan(num_reqs, slots, ends, denoising, wanted, None if len(logits) == total else logits)

    def _token_ids(self, batch: Any, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """(Index into the step's tokens, token id) of canvases and of finished blocks: two blocks at most, which end
        where the request's query ends."""
        canvases, length = self.canvases, self.block_length
        # Past the prompt vLLM knows no token of a query but its drafts. A finished block may stand alone, where the
        # step has no room for the canvas.
        alone = plan.ends == canvases.start[plan.slots]
        alone &= plan.ends > batch.prefill_len_np[: plan.num_reqs]
        rows = np.union1d(plan.denoising, np.flatnonzero(alone))
        slots = plan.slots[rows]
        pair = np.concatenate([canvases.previous[slots], canvases.tokens[slots]], axis=1)
        last = np.where(alone[rows], length, 2 * length)
        column = np.arange(2 * length)[None, :]
        query = batch.num_scheduled_tokens[rows][:, None]
        inside = (column < last[:, None]) & (column >= last[:, None] - query)
        row, column = np.nonzero(inside)
        index = batch.query_start_loc_np[1:][rows][row] - (last[row] - column)
        return index.astype(np.int64), pair[row, column]

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[Any]],
        kv_cache_config: Any,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """One non-causal row for each block of each request's query (``make_block_causal_virtual_batches``), out of
        what the host knows. Not for full CUDA graphs, whose tensors would have to stay where they are:
        ``BlockDiffusionConfig`` asks for piecewise ones."""
        num_reqs = input_batch.num_reqs
        query_lens = input_batch.num_scheduled_tokens[:num_reqs]
        rows = block_causal_rows(
            query_lens, input_batch.num_computed_tokens_np[:num_reqs] + query_lens, self.block_length
        )
        query_start_loc, seq_lens = torch.from_numpy(rows.query_start_loc), torch.from_numpy(rows.seq_lens)
        owners = torch.from_numpy(rows.requests).to(self.device, non_blocking=True)
        return build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=len(rows.seq_lens),
            num_tokens=input_batch.num_tokens,
            query_start_loc_gpu=query_start_loc.to(self.device, non_blocking=True),
            query_start_loc_cpu=query_start_loc,
            max_query_len=rows.max_query_len,
            seq_lens=seq_lens.to(self.device, non_blocking=True),
            max_seq_len=rows.max_seq_len,
            block_tables=tuple(table[owners] for table in block_tables),
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            seq_lens_cpu_upper_bound=seq_lens,
            for_cudagraph_capture=for_capture,
            causal=False,
        )
