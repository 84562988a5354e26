"""A live block-diffusion request: which block is being denoised, and when the next one starts."""

from __future__ import annotations

from collections.abc import Callable

from replicas.decoding.adjustments import LogitAdjustment
from replicas.decoding.unmasking import num_steps, transfer_count, unmask, unmask_and_edit
from replicas.engine.request_state import RequestState, RowInput
from replicas.model_info import ModelInfo
from replicas.protocol import DiffusionParams, FinishReason, GenerationRequest, RequestOutput, TokenLogprob

#: (request_id, block index, [(absolute position, token id)...]): called once per denoising forward.
Trace = Callable[[str, int, list[tuple[int, int]]], None]


class DiffusionState(RequestState):
    """Denoises one block (the canvas) after the other, from the block that holds the first generated token.

    A forward that reaches the canvas' end denoises it. It computes the queries [num_computed_tokens,
    canvas_end): so the block before, whose tokens are final since the last forward, gets its final keys and
    values in the same forward (2 blocks of queries), and so do the last whole blocks of the prompt. What the
    forward wrote for the canvas itself is overwritten by the next one: a canvas is never committed while it
    can change.
    """

    def __init__(
        self,
        request: GenerationRequest,
        info: ModelInfo,
        seed: int,
        *,
        reference_stopping: bool = False,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(request, info, seed)
        assert info.block_length is not None
        assert info.mask_token_id is not None
        self.block_length = info.block_length
        self.mask_token_id = info.mask_token_id
        self.params = request.diffusion or DiffusionParams()
        self._reference_stopping = reference_stopping
        self._trace = trace
        self._steps = num_steps(self.params, request.sampling.max_tokens, self.block_length)
        self._block = self.num_given // self.block_length
        self._last_block = (self.end + self.block_length - 1) // self.block_length - 1
        self._stop_seen = False
        self._logprobs: dict[int, TokenLogprob] = {}
        self._open_block()

    @property
    def canvas_start(self) -> int:
        return self._block * self.block_length

    @property
    def canvas_end(self) -> int:
        return self.canvas_start + self.block_length

    def reusable_prefix(self, num_tokens: int) -> int:
        # Inside a block every position has seen the others, and the canvas changes.
        return min(num_tokens // self.block_length * self.block_length, self.canvas_start)

    @property
    def num_pending_tokens(self) -> int:
        return self.canvas_end - self.num_computed_tokens

    def chunk(self, budget: int) -> int:
        pending = self.num_pending_tokens
        if pending <= budget:
            return pending
        # Whole blocks only: inside a block every position sees the others. Not the canvas: it is not final.
        blocks = min(max(0, budget) // self.block_length, pending // self.block_length - 1)
        return blocks * self.block_length

    def prefill_chunk(self, budget: int) -> int:
        left = self.canvas_start - self.num_computed_tokens
        return 0 if self.started else min(budget // self.block_length * self.block_length, left)

    def prepare(self, num_tokens: int) -> RowInput:
        start = self.num_computed_tokens
        row = RowInput(
            start,
            self.tokens[start : start + num_tokens],
            step=self._step,
            num_prompt_tokens=self.num_prompt_tokens(start, start + num_tokens),
        )
        if start + num_tokens == self.canvas_end:
            # LLaDA2.1 reads the prediction at decided positions too, to edit them.
            everything = self.params.editing_threshold is not None
            first = max(self.canvas_start, self.num_given)
            row.positions = [
                position
                for position in range(first, self.canvas_end)
                if everything or self.tokens[position] == self.mask_token_id
            ]
            row.decide = [position - start for position in row.positions]
            row.banned = [self.banned_at(position) for position in row.positions]
            if self._bias is not None:
                row.adjustment = LogitAdjustment(bias=self._bias)
        return row

    def apply(
        self,
        row: RowInput,
        tokens: list[int],
        confidence: list[float],
        logprobs: list[TokenLogprob] | None = None,
    ) -> RequestOutput | None:
        if not row.decide:
            self.num_computed_tokens = row.start + len(row.token_ids)
            return None
        self.num_computed_tokens = self.canvas_start
        self.num_forwards += 1
        if self.params.editing_threshold is None:
            block_done, changes = self._unmask(row.positions, tokens, confidence)
        else:
            block_done, changes = self._unmask_and_edit(row.positions, tokens, confidence)
        if self._trace is not None:
            self._trace(self.request_id, self._block, changes)
        if logprobs is not None:
            # A token's are those of the pass that decided it, or last changed it.
            entries = dict(zip(row.positions, logprobs, strict=True))
            self._logprobs.update((position, entries[position]) for position, _ in changes)

        if self.params.editing_threshold is None:
            new = self._emit(self.canvas_end if block_done else self._first_mask())
        else:
            # An edit may still change any token of an unfinished block.
            new = self._emit(self.canvas_end) if block_done else []
        if self._is_finished(block_done, changes):
            self.finish_reason = FinishReason.STOP if self._stop_seen else FinishReason.LENGTH
        elif block_done:
            self._block += 1
            self._open_block()
        if not new and self.finish_reason is None:
            return None
        return self.output(new, self._take_logprobs(len(new)))

    def _take_logprobs(self, count: int) -> list[TokenLogprob] | None:
        """Those of the last ``count`` emitted tokens."""
        if self.request.sampling.logprobs is None:
            return None
        end = self.emit_position
        return [self._logprobs.pop(position) for position in range(end - count, end)]

    def _open_block(self) -> None:
        self._step = 0
        self._post_steps = 0
        self.tokens += [self.mask_token_id] * (self.canvas_end - len(self.tokens))

    def _masks_left(self) -> bool:
        return self.mask_token_id in self.tokens[self.canvas_start : self.canvas_end]

    def _first_mask(self) -> int:
        try:
            return self.tokens.index(self.mask_token_id, self.emit_position, self.canvas_end)
        except ValueError:
            return self.canvas_end

    def _unmask(
        self, positions: list[int], tokens: list[int], confidence: list[float]
    ) -> tuple[bool, list[tuple[int, int]]]:
        """LLaDA2.0's step: (whether the block is done, changes)."""
        count = transfer_count(self._step, self._steps, self.block_length)
        chosen = unmask(confidence, self.params.threshold, count)
        changes = [(positions[i], tokens[i]) for i in chosen]
        self._set(changes)
        self._step += 1
        return self._step >= self._steps or not self._masks_left(), changes

    def _unmask_and_edit(
        self, positions: list[int], tokens: list[int], confidence: list[float]
    ) -> tuple[bool, list[tuple[int, int]]]:
        """LLaDA2.1's pass: (whether the block is done, changes)."""
        had_masks = self._masks_left()
        assert self.params.editing_threshold is not None
        picked = unmask_and_edit(
            [self.tokens[position] for position in positions],
            tokens,
            confidence,
            mask_token_id=self.mask_token_id,
            threshold=self.params.threshold,
            editing_threshold=self.params.editing_threshold,
            num_to_transfer=self.params.num_to_transfer,
        )
        changes = [(positions[i], token) for i, token in picked]
        self._set(changes)
        self._step += 1
        if not had_masks and not changes:
            return True, changes
        if not self._masks_left():
            # The next pass would only edit; such passes are counted.
            self._post_steps += 1
            return self._post_steps > self.params.max_post_steps, changes
        return False, changes

    def _set(self, changes: list[tuple[int, int]]) -> None:
        for position, token in changes:
            self.tokens[position] = token

    def _emit(self, limit: int) -> list[int]:
        """Final tokens up to position ``limit``: nothing past ``max_tokens`` or after a stop token."""
        if self._stop_seen:
            return []
        new = self.tokens[self.emit_position : min(limit, self.end)]
        for i, token in enumerate(new):
            if token in self.stop_tokens:
                self._stop_seen = True
                new = new[: i + 1]
                break
        self.num_emitted += len(new)
        return new

    def _is_finished(self, block_done: bool, changes: list[tuple[int, int]]) -> bool:
        early = self.params.eos_early_stop
        if block_done and self._block == self._last_block:
            return True
        if self.params.editing_threshold is not None:
            return block_done and early and self._stop_in_generated()
        if block_done and self._stop_in_generated():
            return True
        if not early:
            return False
        if self._reference_stopping:
            # As the original: looks only when a stop token is set now, and not at max_tokens.
            stop_set = any(token in self.stop_tokens for _, token in changes)
            return stop_set and self._stop_in_generated()
        return self._stop_seen or self.emit_position >= self.end

    def _stop_in_generated(self) -> bool:
        """A stop token among the generated ones (past ``max_tokens`` too), with no mask before it."""
        for position in range(self.num_given, self.canvas_end):
            token = self.tokens[position]
            if token == self.mask_token_id:
                return False
            if token in self.stop_tokens:
                return True
        return False
