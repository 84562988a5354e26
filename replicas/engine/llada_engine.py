"""The engine of block-diffusion models (LLaDA2.0, LLaDA2.1): one denoising pass per request and forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicas.engine.diffusion_state import DiffusionState, Trace
from replicas.engine.request_state import RequestState
from replicas.engine.slot_engine import SlotEngine
from replicas.errors import ModelLoadError
from replicas.model_info import ModelInfo
from replicas.protocol import GenerationRequest, RequestOutput


class LLaDAEngine(SlotEngine):
    """``SlotEngine`` with one denoising pass per request and step.

    Args:
        ban_mask_token: never choose the mask token (see ``decoding.sampling.select_tokens``). The original
            code does not ban it; False follows it, for verification.
        reference_stopping: stop exactly where the original `generate` stops, so that forward counts are equal
            too. By default a request ends as soon as its tokens are known, which saves forwards.
        trace: called with every pass's changes.
    """

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        *,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        static_decode: bool = False,
        ban_mask_token: bool = True,
        reference_stopping: bool = False,
        trace: Trace | None = None,
    ) -> None:
        if info.block_length is None:
            raise ModelLoadError(f"{info.architecture} is not a block-diffusion model")
        self.block_length = info.block_length
        self._mask_token_id = info.mask_token_id if ban_mask_token else None
        self._reference_stopping = reference_stopping
        self._trace = trace
        super().__init__(
            model,
            info,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            static_decode=static_decode,
        )

    def new_state(self, request: GenerationRequest, seed: int) -> RequestState:
        return DiffusionState(
            request, self.info, seed, reference_stopping=self._reference_stopping, trace=self._trace
        )

    def batch_denoise_step(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        """One forward for all ``requests``, which were prefilled: each gets one pass over its block, and the
        block before it is committed in the same forward. One output each, often without new tokens.

        Raises ``SlotError`` for a request that was not prefilled or has finished.
        """
        return self._batch_step(requests)
