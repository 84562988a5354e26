"""What the two model engines share: KV slots, and one forward per step over all requests of the step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from replicas.decoding.sampling import SamplingRows, apply_grammars, select_tokens, token_logprobs
from replicas.engine.model_runner import ModelRunner
from replicas.engine.prefix_cache import PrefixCache
from replicas.engine.request_state import RequestState, RowInput
from replicas.engine.scheduler import ScheduledRow
from replicas.engine.slots import SlotAllocator
from replicas.errors import BlockserveError, ModelLoadError, SlotError, StepFailedError
from replicas.model_info import ModelInfo
from replicas.protocol import (
    EngineCapabilities,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    TokenLogprob,
)

logger = logging.getLogger(__name__)


class SlotEngine(ABC):
    """A model with ``max_num_seqs`` KV slots, each of ``max_model_len`` positions; both fixed here.

    ``enable_prefix_caching``: a freed slot keeps its tokens, and a request that begins alike does not compute
    them again. ``static_decode``: see ``ModelRunner``. Raises ``ModelLoadError`` for limits that cannot work. Not
    thread-safe.
    """

    block_length: int | None = None
    supports_penalties = False
    supports_structured_output = False
    #: Whether states want to know how probable the chosen tokens are.
    _needs_confidence = True
    #: A token that is never chosen.
    _mask_token_id: int | None = None

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
    ) -> None:
        limit = info.max_model_len if max_model_len is None else max_model_len
        if info.block_length is not None:
            limit = limit // info.block_length * info.block_length
        if not 1 <= limit <= info.max_model_len:
            raise ModelLoadError(
                f"`max_model_len` must be {info.block_length or 1} to {info.max_model_len}, "
                f"got {max_model_len}"
            )
        if max_num_batched_tokens < (info.block_length or 1):
            raise ModelLoadError(
                f"`max_num_batched_tokens` must be at least one block ({info.block_length} tokens), "
                f"got {max_num_batched_tokens}"
            )
        self.model = model
        self.info = info
        self.max_model_len = limit
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slots = SlotAllocator(by_age=enable_prefix_caching)
        self.prefix_cache = PrefixCache(self.slots) if enable_prefix_caching else None
        self.allocate_batch_slots(max_num_seqs)
        self.runner = ModelRunner(model, max_num_seqs, limit, self.block_length, static_decode=static_decode)
        self._states: dict[str, RequestState] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            supports_batching=self.supports_batching(),
            max_num_seqs=self.slots.num_slots,
            max_model_len=self.max_model_len,
            block_length=self.block_length,
            logprobs=True,
            structured_output=self.supports_structured_output,
            penalties=self.supports_penalties,
            prefix_caching=self.prefix_cache is not None,
        )

    def supports_batching(self) -> bool:
        """Whether several requests can share a forward."""
        return self.slots.num_slots > 1

    def allocate_batch_slots(self, n: int) -> None:
        """Fixes the number of slots; raises ``SlotError`` for another number than the one at construction."""
        self.slots.allocate_batch_slots(n)

    def allocate_slot(self, request_id: str) -> int:
        """A free slot, with nothing cached: the tokens are not known yet.

        Raises ``SlotError`` for a duplicate, ``SlotsExhaustedError`` when no slot is free.
        """
        slot = self.slots.allocate_slot(request_id)
        if self.prefix_cache is not None:
            self.prefix_cache.forget(slot)
        return slot

    def free_slot(self, request_id: str) -> int:
        """Ends a request in any phase. Raises ``SlotError`` for one without a slot."""
        state = self._states.pop(request_id, None)
        if state is None or self.prefix_cache is None:
            return self.slots.free_slot(request_id)
        return self.prefix_cache.free(state)

    def batch_prefill(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        """Computes the prompts of requests that have slots, together, in chunks of at most
        ``max_num_batched_tokens``. Returns one output per request; an autoregressive one has its first token.

        Raises ``SlotError`` for a request without a slot or that was prefilled before.
        """
        states = []
        for request in requests:
            if request.request_id in self._states:
                raise SlotError(f"request {request.request_id!r} was prefilled before")
            state = self.new_state(request, request.sampling.seed or 0)
            state.slot = self.slots.slot_of(request.request_id)
            states.append(state)
        self._states.update((state.request_id, state) for state in states)
        outputs: dict[str, RequestOutput] = {}
        while True:
            budget = self.max_num_batched_tokens
            rows = []
            for state in states:
                num_tokens = 0 if state.finish_reason else state.prefill_chunk(budget)
                if num_tokens:
                    rows.append(ScheduledRow(state, num_tokens))
                    budget -= num_tokens
            if not rows:
                return [outputs.get(state.request_id) or state.output() for state in states]
            outputs.update((output.request_id, output) for output in self.execute(rows))

    def _batch_step(self, requests: Iterable[GenerationRequest]) -> list[RequestOutput]:
        """One forward over requests that were prefilled; one output per request."""
        states = []
        for request in requests:
            state = self._states.get(request.request_id)
            if state is None or state.finish_reason:
                what = "was not prefilled" if state is None else "has finished"
                raise SlotError(f"request {request.request_id!r} {what}")
            states.append(state)
        rows = [ScheduledRow(state, state.num_pending_tokens) for state in states]
        outputs = {output.request_id: output for output in self.execute(rows)}
        return [outputs.get(state.request_id) or state.output() for state in states]

    @abstractmethod
    def new_state(self, request: GenerationRequest, seed: int) -> RequestState:
        """The state of a valid request; it has no slot yet."""

    def execute(self, rows: Sequence[ScheduledRow]) -> list[RequestOutput]:
        """One forward over all rows, whatever their phase, and what it decides; no rows, no forward.

        Returns the outputs of requests that have something to say. A fault of one row before or after the
        forward fails that request alone (``finish_reason`` ERROR); a fault of the forward is raised.
        """
        outputs: list[RequestOutput] = []
        batch: list[tuple[RequestState, RowInput]] = []
        for scheduled in rows:
            try:
                batch.append((scheduled.state, scheduled.state.prepare(scheduled.num_tokens)))
            except Exception as error:
                outputs.append(failed_output(scheduled.state, error))
        if not batch:
            return outputs
        chosen = self._forward(batch)
        for (state, row), (tokens, confidence, logprobs) in zip(batch, chosen, strict=True):
            try:
                output = state.apply(row, tokens, confidence, logprobs)
            except Exception as error:
                output = failed_output(state, error)
            if output is not None:
                outputs.append(output)
        return outputs

    def close(self) -> None:
        """Drops the model and the KV memory."""
        self.model = None
        self._states.clear()
        self.runner.close()

    def _slot(self, state: RequestState) -> int:
        assert state.slot is not None
        return state.slot

    @torch.inference_mode()
    def _forward(
        self, batch: list[tuple[RequestState, RowInput]]
    ) -> list[tuple[list[int], list[float], list[TokenLogprob] | None]]:
        """Copies prefixes, runs the model, chooses: see ``_choose``."""
        cache = self.prefix_cache
        rows = [(self._slot(state), row) for state, row in batch]
        try:
            chosen = self._choose(self.runner.forward(rows, cache.copies if cache else ()), batch)
        except BaseException:
            if cache is not None:
                cache.copies_failed()
            raise
        if cache is not None:
            cache.copies_done()
        return chosen

    def _choose(
        self, logits: Iterator[torch.Tensor], batch: list[tuple[RequestState, RowInput]]
    ) -> list[tuple[list[int], list[float], list[TokenLogprob] | None]]:
        """Tokens, confidences and logprobs of each row of ``batch``; ``logits`` come for decided positions only."""
        rows = SamplingRows()
        num_logprobs: list[int | None] = []
        for state, row in batch:
            sampling = state.request.sampling
            for i in range(len(row.decide)):
                num_logprobs.append(sampling.logprobs)
                rows.append(
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    seed=state.seed,
                    position=row.positions[i],
                    step=row.step,
                    banned=row.banned[i],
                    min_p=sampling.min_p,
                    adjustment=row.adjustment,
                )
        tokens, confidence, logprobs = self._select(logits, rows, num_logprobs)
        result = []
        at = 0
        for _, row in batch:
            end = at + len(row.decide)
            entries = [entry for entry in logprobs[at:end] if entry is not None]
            result.append((tokens[at:end], confidence[at:end], entries or None))
            at = end
        return result

    def _select(
        self, parts: Iterator[torch.Tensor], rows: SamplingRows, num_logprobs: list[int | None]
    ) -> tuple[list[int], list[float], list[TokenLogprob | None]]:
        token_parts, confidence_parts = [], []
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        start = 0
        for logits in parts:
            end = start + len(logits)
            part = rows.slice(start, end)
            apply_grammars(logits, part)
            wanted = [i for i in range(start, end) if num_logprobs[i] is not None]
            # A copy, for the choice below changes the logits.
            raw = logits[[i - start for i in wanted]] if wanted else None
            tokens, confidence = select_tokens(
                logits,
                part,
                mask_token_id=self._mask_token_id,
                with_confidence=self._needs_confidence,
            )
            token_parts.append(tokens)
            if confidence is not None:
                confidence_parts.append(confidence)
            if raw is not None:
                entries = _logprob_entries(
                    raw, tokens[[i - start for i in wanted]], [num_logprobs[i] or 0 for i in wanted]
                )
                for i, entry in zip(wanted, entries, strict=True):
                    logprobs[i] = entry
            start = end
        if not token_parts:
            return [], [], []
        confidences = torch.cat(confidence_parts).tolist() if confidence_parts else []
        return torch.cat(token_parts).tolist(), confidences, logprobs


def failed_output(state: RequestState, error: BaseException) -> RequestOutput:
    """Marks a request as failed by ``error``; its last output."""
    logger.error("request %s failed", state.request_id, exc_info=error)
    if not isinstance(error, BlockserveError):
        # The text of a foreign exception may hold anything; its type is enough for a client.
        error = StepFailedError(f"a fault in the engine step failed this request ({type(error).__name__})")
    state.finish_reason = FinishReason.ERROR
    output = state.output()
    output.error = error.to_request_error()
    return output


def _logprob_entries(logits: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> list[TokenLogprob]:
    chosen, ids, values = token_logprobs(logits, tokens, max(counts))
    return [
        TokenLogprob(token, logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token, logprob, top_ids, top_values, count in zip(
            tokens.tolist(), chosen.tolist(), ids.tolist(), values.tolist(), counts, strict=True
        )
    ]
