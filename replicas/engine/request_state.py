"""What an engine keeps of one live request, and how a forward's result moves it on.

No tensors: a state says which tokens it wants computed (``prepare``) and takes what was chosen (``apply``).
Both families share one engine; they differ in the subclass used here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from replicas.decoding.adjustments import LogitAdjustment, Penalties, make_bias
from replicas.engine.grammar import GrammarMatcher
from replicas.model_info import ModelInfo
from replicas.protocol import NEUTRAL_PENALTIES, FinishReason, GenerationRequest, RequestOutput, TokenLogprob


@dataclass(slots=True)
class RowInput:
    """One request's part of a forward.

    ``token_ids`` are computed at positions ``start``, ``start + 1``, ...; the logits at offsets ``decide``
    are wanted, and what is chosen there is keyed by (seed, ``positions[i]``, ``step``). ``banned[i]`` are
    token ids that must not be chosen there; ``adjustment`` is done to all of these logits. ``num_prompt_tokens``:
    given tokens computed for the first time.
    """

    start: int
    token_ids: list[int]
    decide: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    step: int = 0
    banned: list[Sequence[int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    adjustment: LogitAdjustment | None = None


class RequestState(ABC):
    """A live request.

    ``tokens``: prompt, resumed and generated tokens (for block diffusion also the masks of the canvas).
    ``num_computed_tokens``: positions whose keys and values are final in the KV slot.
    ``end``: position after the last token that may be emitted.
    """

    def __init__(self, request: GenerationRequest, info: ModelInfo, seed: int) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.seed = seed
        self.slot: int | None = None
        self.tokens: list[int] = [*request.prompt_token_ids, *request.resume_token_ids]
        #: Tokens given, not generated: the prompt and what was emitted elsewhere.
        self.num_given = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_forwards = 0
        self.num_emitted = 0
        self.finish_reason: FinishReason | None = None
        self.end = len(request.prompt_token_ids) + sampling.max_tokens
        stop = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop |= set(info.eos_token_ids)
        self.stop_tokens = frozenset(stop)
        #: No stop token may be chosen below this position.
        self.min_end = len(request.prompt_token_ids) + sampling.min_tokens
        self._banned_stops = tuple(sorted(stop))
        self._bias = make_bias(sampling.logit_bias)

    @property
    def started(self) -> bool:
        """Whether the prompt is behind it: a token has been decided."""
        return self.num_forwards > 0

    @property
    def emit_position(self) -> int:
        return self.num_given + self.num_emitted

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens not computed yet, and new tokens still allowed."""
        return max(0, self.num_given - self.num_computed_tokens) + max(0, self.end - self.emit_position)

    @cached_property
    def given_tokens(self) -> np.ndarray:
        """int32 [num_given]"""
        return np.array(self.tokens[: self.num_given], dtype=np.int32)

    @property
    def computed_tokens(self) -> np.ndarray:
        """int32 [num_computed_tokens]: the tokens whose keys and values in the slot are final."""
        generated = self.tokens[self.num_given : self.num_computed_tokens]
        return np.concatenate(
            [self.given_tokens[: self.num_computed_tokens], np.array(generated, dtype=np.int32)]
        )

    def take_cached(self, num_tokens: int) -> None:
        """The slot holds the keys and values of the first ``num_tokens`` given tokens, computed by others."""
        self.num_computed_tokens = num_tokens
        # Reported to the client, who knows of no resumed tokens.
        self.num_cached_tokens = min(num_tokens, len(self.request.prompt_token_ids))

    @abstractmethod
    def reusable_prefix(self, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` given tokens may come from another request's computation."""

    @property
    @abstractmethod
    def num_pending_tokens(self) -> int:
        """Tokens to compute until the next decision."""

    @abstractmethod
    def chunk(self, budget: int) -> int:
        """Tokens to compute in the next forward when at most ``budget`` may be; 0 when nothing fits."""

    @abstractmethod
    def prefill_chunk(self, budget: int) -> int:
        """Like ``chunk``, but only for the prompt; 0 when nothing of it is left to compute beforehand."""

    @abstractmethod
    def prepare(self, num_tokens: int) -> RowInput:
        """The part of the next forward; ``num_tokens`` comes from ``chunk``."""

    @abstractmethod
    def apply(
        self,
        row: RowInput,
        tokens: list[int],
        confidence: list[float],
        logprobs: list[TokenLogprob] | None = None,
    ) -> RequestOutput | None:
        """Takes what was chosen at ``row.decide``; None when there is nothing to say. ``confidence`` is empty where the
        engine does not need it."""

    def num_prompt_tokens(self, start: int, end: int) -> int:
        """Given tokens at [start, end); 0 once the prompt is behind it."""
        return 0 if self.started else max(0, min(self.num_given, end) - start)

    def banned_at(self, position: int) -> Sequence[int]:
        return self._banned_stops if position < self.min_end else ()

    def output(
        self, new_token_ids: list[int] | None = None, logprobs: list[TokenLogprob] | None = None
    ) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            new_token_ids or [],
            self.finish_reason,
            logprobs,
            self.num_cached_tokens,
            self.num_forwards,
        )


class AutoregressiveState(RequestState):
    """One token per forward, from the logits of the last token.

    ``grammar`` has taken the resumed tokens already; a request whose output is complete by it ends, as at EOS.
    """

    def __init__(
        self, request: GenerationRequest, info: ModelInfo, seed: int, grammar: GrammarMatcher | None = None
    ) -> None:
        super().__init__(request, info, seed)
        self._grammar = grammar
        sampling = request.sampling
        self._penalizes = any(
            getattr(sampling, name) != neutral for name, neutral in NEUTRAL_PENALTIES.items()
        )

    def reusable_prefix(self, num_tokens: int) -> int:
        # The logits of the last given token decide the first new one.
        return min(num_tokens, self.num_given - 1)

    @property
    def num_pending_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    def chunk(self, budget: int) -> int:
        return max(0, min(budget, self.num_pending_tokens))

    def prefill_chunk(self, budget: int) -> int:
        return 0 if self.started else self.chunk(budget)

    def prepare(self, num_tokens: int) -> RowInput:
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        row = RowInput(start, self.tokens[start:end], num_prompt_tokens=self.num_prompt_tokens(start, end))
        if end == len(self.tokens):
            row.decide, row.positions = [num_tokens - 1], [end]
            row.banned = [self.banned_at(end)]
            if self._grammar is not None or self._bias is not None or self._penalizes:
                row.adjustment = self._adjustment()
        return row

    def _adjustment(self) -> LogitAdjustment:
        sampling = self.request.sampling
        penalties = None
        if self._penalizes:
            penalties = Penalties.of(
                self.tokens,
                len(self.request.prompt_token_ids),
                frequency=sampling.frequency_penalty,
                presence=sampling.presence_penalty,
                repetition=sampling.repetition_penalty,
            )
        allowed = None if self._grammar is None else self._grammar.allowed_tokens()
        return LogitAdjustment(allowed, self._bias, penalties)

    def apply(
        self,
        row: RowInput,
        tokens: list[int],
        confidence: list[float],
        logprobs: list[TokenLogprob] | None = None,
    ) -> RequestOutput | None:
        self.num_computed_tokens = row.start + len(row.token_ids)
        if not row.decide:
            return None
        token = tokens[0]
        self.tokens.append(token)
        self.num_forwards += 1
        self.num_emitted += 1
        complete = self._grammar is not None and self._grammar.advance(token)
        if complete or token in self.stop_tokens:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) >= self.end:
            self.finish_reason = FinishReason.LENGTH
        return self.output([token], logprobs)
