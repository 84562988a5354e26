"""What vLLM's model runner calls as its sampler: chooses tokens for all canvases of a step at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from replicas.decoding.sampling import select_tokens, token_logprobs
from replicas.vllm_engine.plugin.canvas import Canvases, Emission

#: Rows of logits [rows, vocabulary] that are made float32 at once: of LLaDA2.0's vocabulary they take 160 MB.
_ROWS_AT_ONCE = 256


class BlockDiffusionSampler:
    """Takes logits of undecided positions only (``StepPlan.logits``), and moves the canvases on.

    The one wait for the device in a step is here: what was chosen decides what is computed next.
    """

    #: The runner reads it; None is "no counts of emitted tokens".
    penalties_state = SimpleNamespace(output_bin_counts=None)

    def __init__(self, canvases: Canvases, state: Any) -> None:
        self._canvases, self._state = canvases, state

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Nothing: ``BlockDiffusionState.add_request`` has the prompt too."""

    def apply_staged_writes(self) -> None:
        """Nothing is staged."""

    def __call__(
        self, logits: torch.Tensor, input_batch: Any, draft_logits: torch.Tensor | None = None
    ) -> SamplerOutput:
        plan = self._state.plan
        num_reqs, length = input_batch.num_reqs, self._canvases.block_length
        num_sampled = np.zeros(num_reqs, dtype=np.int32)
        sampled = np.zeros((num_reqs, length), dtype=np.int64)
        computed_until = np.zeros(num_reqs, dtype=np.int64)
        logprobs = None
        if plan is not None and plan.num_reqs == num_reqs:
            # Before the canvases move on: the blocks before them are final now.
            computed_until = np.minimum(plan.ends, self._canvases.start[plan.slots])
            if len(plan.denoising):
                slots = plan.slots[plan.denoising]
                emission = self._decide(logits, slots, plan.wanted)
                num_sampled[plan.denoising] = emission.num_tokens
                sampled[plan.denoising] = emission.tokens
                logprobs = self._emitted_logprobs(emission, plan.denoising, num_reqs, logits.device)
            # Never more than the query had; vLLM's warm-up on a GPU, which nobody rolls back, would ask for more.
            query = input_batch.num_scheduled_tokens[:num_reqs]
            num_rejected = np.clip(plan.ends - computed_until, 0, query).astype(np.int32)
        else:
            # A dummy batch (profiling, warm-up): nothing is emitted, everything counts as computed.
            num_rejected = np.zeros(num_reqs, dtype=np.int32)
        device = logits.device
        return SamplerOutput(
            sampled_token_ids=torch.from_numpy(sampled).to(device),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=torch.from_numpy(num_sampled).to(device),
            num_rejected=torch.from_numpy(num_rejected).to(device),
        )

    def _decide(self, logits: torch.Tensor, slots: np.ndarray, wanted: np.ndarray) -> Emission:
        canvases = self._canvases
        rows = canvases.sampling_rows(slots, wanted)
        row, column = np.nonzero(wanted)
        with_logprobs = canvases.wants_logprobs(slots)[row]
        num_top = max(0, canvases.max_logprobs(slots))
        predicted = np.zeros(wanted.shape, dtype=np.int64)
        confidence = np.zeros(wanted.shape, dtype=np.float32)
        logprobs = None
        if with_logprobs.any():
            shape = (*wanted.shape, num_top + 1)
            logprobs = (
                np.zeros(shape, np.int64),
                np.full(shape, -np.inf, np.float32),
                np.zeros(wanted.shape, np.int64),
            )
        for begin in range(0, len(row), _ROWS_AT_ONCE):
            part = slice(begin, min(begin + _ROWS_AT_ONCE, len(row)))
            # The rows may be views of what vLLM keeps; they are overwritten below.
            values = logits[part].float() if logits.dtype != torch.float32 else logits[part].clone()
            picked = np.flatnonzero(with_logprobs[part])
            raw = values[torch.from_numpy(picked).to(values.device)] if len(picked) else None
            tokens, conf = select_tokens(
                values,
                rows.slice(part.start, part.stop),
                mask_token_id=canvases.mask_token_id,
                with_confidence=True,
            )
            assert conf is not None
            predicted[row[part], column[part]] = tokens.cpu().numpy()
            confidence[row[part], column[part]] = conf.cpu().numpy()
            if raw is not None and logprobs is not None:
                chosen = tokens[torch.from_numpy(picked).to(tokens.device)]
                at = (row[part][picked], column[part][picked])
                _store_logprobs(logprobs, at, raw, chosen, num_top)
        return canvases.apply(slots, predicted, confidence, logprobs)

    def _emitted_logprobs(
        self, emission: Emission, denoising: np.ndarray, num_reqs: int, device: torch.device
    ) -> LogprobsTensors | None:
        """Entries of all emitted tokens, request after request; vLLM cuts them by ``cu_num_generated_tokens``."""
        if emission.logprobs is None:
            return None
        counts = np.zeros(num_reqs, dtype=np.int64)
        counts[denoising] = emission.num_tokens
        starts = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        column = np.arange(self._canvases.block_length)[None, :]
        emitted = column < emission.num_tokens[:, None]
        ids, values, ranks = (part[emitted] for part in emission.logprobs)
        return LogprobsTensors(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(values).to(device),
            torch.from_numpy(ranks).to(device),
            starts.tolist(),
        )


def _store_logprobs(
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray],
    at: tuple[np.ndarray, np.ndarray],
    raw: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
) -> None:
    """vLLM's layout: the chosen token, then the best ones."""
    chosen, ids, values = token_logprobs(raw, tokens, max(1, num_top))
    better = (raw > raw.gather(1, tokens[:, None])).sum(dim=1)
    logprobs[0][(*at, 0)] = tokens.cpu().numpy()
    logprobs[1][(*at, 0)] = chosen.cpu().numpy()
    logprobs[0][(*at, slice(1, num_top + 1))] = ids[:, :num_top].cpu().numpy()
    logprobs[1][(*at, slice(1, num_top + 1))] = values[:, :num_top].cpu().numpy()
    logprobs[2][at] = better.cpu().numpy() + 1
