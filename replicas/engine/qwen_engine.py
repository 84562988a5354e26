"""The engine of autoregressive models (Qwen, Llama-shaped): one token per request and forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from replicas.engine.grammar import GrammarCompiler
from replicas.engine.request_state import AutoregressiveState, RequestState
from replicas.engine.slot_engine import SlotEngine
from replicas.protocol import GenerationRequest, RequestOutput


class QwenEngine(SlotEngine):
    """``SlotEngine`` with one new token per request and step."""

    supports_penalties = True
    supports_structured_output = True
    _needs_confidence = False

    def new_state(self, request: GenerationRequest, seed: int) -> RequestState:
        grammar = None
        if request.sampling.grammar is not None:
            grammar = self._grammars.matcher(request.sampling.grammar, request.resume_token_ids)
        return AutoregressiveState(request, self.info, seed, grammar)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.info)

    def batch_decode_step(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        """One forward for all ``requests``, which were prefilled; one output with one token for each.

        Raises ``SlotError`` for a request that was not prefilled or has finished.
        """
        return self._batch_step(requests)
