"""The engine of autoregressive models (Qwen, Llama-shaped): one token per request and forward."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.engine.request_state import AutoregressiveState, RequestState
from replicas.engine.slot_engine import SlotEngine
from replicas.protocol import GenerationRequest, RequestOutput


class QwenEngine(SlotEngine):
    """``SlotEngine`` with one new token per request and step."""

    supports_logprobs = True
    _needs_confidence = False

    def new_state(self, request: GenerationRequest, seed: int) -> RequestState:
        return AutoregressiveState(request, self.info, seed)

    def batch_decode_step(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        """One forward for all ``requests``, which were prefilled; one output with one token for each.

        Raises ``SlotError`` for a request that was not prefilled or has finished.
        """
        return self._batch_step(requests)
