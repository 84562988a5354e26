"""vLLM's scheduler for block diffusion: whole blocks, and what of a step's work is final."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus


class BlockDiffusionScheduler(DiffusionScheduler):
    """Canvases are draft tokens of vLLM's scheduler: ``block_length`` less what the prompt has of the block.

    * Prompts are cut at block borders only: inside a block every token sees the others.
    * The keys and values of a canvas, and of the prompt's part in it, are not final. After each step
      ``num_computed_tokens`` goes back to the end of the last whole block of tokens.
    * A finished block's tokens are appended without their keys and values; these are computed with the next canvas, in
      one forward of two blocks. A request that ends with its block never computes them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise ValueError(
                "block diffusion needs `async_scheduling=False`: what a step decides shapes the next one"
            )
        self.block_length: int = self.vllm_config.diffusion_config.canvas_length
        # vLLM's hook for prompts that must be cut where a state can be kept.
        self.need_mamba_block_aligned_split = True

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        # Comes with the request's last output: one entry for each denoising forward.
        request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self.num_spec_tokens)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """``num_new_tokens`` or fewer, so that the step ends at a block border or takes all there is; 0 when nothing
        fits."""
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        end = start + num_new_tokens
        if end >= request.num_tokens + len(request.spec_token_ids):
            return num_new_tokens
        # Never a part of the canvas, whose tokens see one another.
        border = min(end, request.num_tokens) // self.block_length * self.block_length
        return max(0, border - start)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        before = {
            req_id: (request.num_computed_tokens, request.num_tokens)
            for req_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(req_id)) is not None
        }
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        length = self.block_length
        for req_id, (end, num_tokens) in before.items():
            request = self.requests.get(req_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            # As the worker does: see BlockDiffusionSampler.
            request.num_computed_tokens = min(end, num_tokens // length * length)
            if end >= num_tokens:
                request.spec_token_ids = [-1] * (length - request.num_tokens % length)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Nothing: ``update_from_output`` knows how long the canvas is, and what is in it is the worker's."""
