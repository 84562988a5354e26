"""The blocks that live requests are denoising, as arrays over all of them: LLaDA2's rules without vLLM and torch.

A canvas is the block that a request works on: what is left of its prompt first (``first`` tokens, never changed), then
tokens decided so far and masks. Slots are the worker's request indices. All of it is on the host, so that what the next
forward computes is known without waiting for a device.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replicas.decoding.adjustments import LogitAdjustment, make_bias
from replicas.decoding.sampling import SamplingRows
from replicas.decoding.unmasking import edit_rows, num_steps, transfer_counts, unmask_rows
from replicas.protocol import DiffusionParams


@dataclass(frozen=True)
class CanvasParams:
    """How one request is decoded. ``max_tokens`` and ``min_tokens`` count from the end of the prompt that vLLM got, in
    which the last ``num_resumed`` tokens were generated elsewhere."""

    max_tokens: int
    min_tokens: int = 0
    num_resumed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    diffusion: DiffusionParams = field(default_factory=DiffusionParams)

    @classmethod
    def from_vllm(cls, sampling: Any) -> CanvasParams:
        """From vLLM's ``SamplingParams``, which refuses most of them for diffusion models: they are in ``extra_args``.

        A value of the wrong kind or out of range counts as not given. This runs in vLLM's worker, where an exception
        would end the engine for everyone; who wants errors checks before (``replicas.engine.validation``).
        """
        extra, default = _Extra(sampling.extra_args or {}), DiffusionParams()
        stop = set(sampling.stop_token_ids or ())
        eos = getattr(sampling, "eos_token_id", None)
        if eos is not None and not sampling.ignore_eos:
            stop.add(eos)
        diffusion = DiffusionParams(
            steps=extra.integer("steps", None, 1),
            threshold=extra.number("threshold", default.threshold, 0, 1),
            minimal_topk=extra.integer("minimal_topk", 1, 1),
            eos_early_stop=bool(extra.integer("eos_early_stop", 1, 0)),
            editing_threshold=extra.number("editing_threshold", None, 0, 1),
            max_post_steps=extra.integer("max_post_steps", default.max_post_steps, 0),
            num_to_transfer=extra.integer("num_to_transfer", 1, 1),
        )
        seed = extra.integer("seed", None, None)
        return cls(
            max_tokens=sampling.max_tokens or 1,
            min_tokens=extra.integer("min_tokens", 0, 0),
            num_resumed=extra.integer("num_resumed", 0, 0),
            temperature=extra.number("temperature", 0.0, 0, None),
            top_k=extra.integer("top_k", max(0, sampling.top_k or 0), 0),
            top_p=extra.number("top_p", sampling.top_p, 0, 1) or 1.0,
            seed=secrets.randbits(62) if seed is None else seed,
            stop_token_ids=tuple(sorted(stop)),
            logprobs=sampling.logprobs,
            min_p=extra.number("min_p", 0.0, 0, 1),
            logit_bias=extra.pairs("logit_bias"),
            diffusion=diffusion,
        )

    def to_extra_args(self) -> dict[str, Any]:
        """What ``from_vllm`` reads beside vLLM's own parameters."""
        diffusion = self.diffusion
        given = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "logit_bias": [list(pair) for pair in self.logit_bias],
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "num_resumed": self.num_resumed,
            "steps": diffusion.steps,
            "threshold": diffusion.threshold,
            "minimal_topk": diffusion.minimal_topk,
            "eos_early_stop": int(diffusion.eos_early_stop),
            "editing_threshold": diffusion.editing_threshold,
            "max_post_steps": diffusion.max_post_steps,
            "num_to_transfer": diffusion.num_to_transfer,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Emission:
    """What a step gives to R requests: ``num_tokens`` int64 [R], and ``tokens`` int64 [R, B] whose first ``num_tokens``
    count. ``logprobs``: ids int64 and values float32 [R, B, K + 1] (the token itself first) and its ranks int64 [R, B],
    or None."""

    num_tokens: np.ndarray
    tokens: np.ndarray
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


class Canvases:
    """Canvases of up to ``num_slots`` requests, blocks of ``block_length`` tokens."""

    def __init__(self, num_slots: int, block_length: int, mask_token_id: int) -> None:
        self.block_length, self.mask_token_id = block_length, mask_token_id
        shape = (num_slots, block_length)
        #: int64 [slots, B]: the canvas, and the block before it, whose keys and values the next forward makes final.
        self.tokens = np.full(shape, mask_token_id, dtype=np.int64)
        self.previous = np.full(shape, mask_token_id, dtype=np.int64)
        #: int64 [slots]: position of the canvas; its tokens that are given; position after the last token wanted;
        #: position below which no stop token may be chosen.
        self.start, self.first, self.end, self.min_end = np.zeros((4, num_slots), dtype=np.int64)
        self._step, self._post_steps = np.zeros((2, num_slots), dtype=np.int64)
        self._steps, self._transfer, self._max_post = np.ones((3, num_slots), dtype=np.int64)
        self._threshold, self._editing = np.zeros((2, num_slots), dtype=np.float32)
        self._edits, self._early = np.zeros((2, num_slots), dtype=bool)
        self._temperature, self._top_p = np.ones((2, num_slots), dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._seed = np.zeros(num_slots, dtype=object)  # any integer
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        self._min_p = np.zeros(num_slots, dtype=np.float64)
        self._adjustments: list[LogitAdjustment | None] = [None] * num_slots
        # Padded with -1, which is no token.
        self._stop = np.full((num_slots, 1), -1, dtype=np.int64)
        self._logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def add(self, slot: int, given: Sequence[int], prompt_len: int, params: CanvasParams) -> None:
        """Opens the canvas after the ``given`` tokens: the prompt (``prompt_len`` of them) and, when a request goes on
        after a preemption, whole blocks that it has generated."""
        diffusion, length = params.diffusion, self.block_length
        self.first[slot] = len(given) % length
        self.start[slot] = len(given) - self.first[slot]
        self.end[slot] = prompt_len + params.max_tokens
        self.min_end[slot] = prompt_len + params.min_tokens
        self._steps[slot] = max(1, num_steps(diffusion, params.max_tokens + params.num_resumed, length))
        self._threshold[slot] = diffusion.threshold
        self._edits[slot] = diffusion.editing_threshold is not None
        self._editing[slot] = diffusion.editing_threshold or 0.0
        self._transfer[slot] = diffusion.num_to_transfer
        self._max_post[slot] = diffusion.max_post_steps
        self._early[slot] = diffusion.eos_early_stop
        self._temperature[slot] = params.temperature
        self._top_k[slot], self._top_p[slot] = params.top_k, params.top_p
        self._seed[slot] = params.seed
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._min_p[slot] = params.min_p
        bias = make_bias(params.logit_bias)
        self._adjustments[slot] = None if bias is None else LogitAdjustment(bias=bias)
        missing = len(params.stop_token_ids) - self._stop.shape[1]
        if missing > 0:
            self._stop = np.pad(self._stop, ((0, 0), (0, missing)), constant_values=-1)
        self._stop[slot] = -1
        self._stop[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._open(np.array([slot]))
        self.tokens[slot, : self.first[slot]] = given[len(given) - int(self.first[slot]) :]

    def undecided(self, slots: np.ndarray) -> np.ndarray:
        """Positions whose logits are wanted: bool [R, B]. LLaDA2.1 reads those of decided tokens too, to edit them."""
        generated = np.arange(self.block_length)[None, :] >= self.first[slots][:, None]
        return generated & ((self.tokens[slots] == self.mask_token_id) | self._edits[slots][:, None])

    def sampling_rows(self, slots: np.ndarray, wanted: np.ndarray) -> SamplingRows:
        """Parameters of the logits rows at ``wanted`` (bool [R, B]), row by row, for ``select_tokens``."""
        row, column = np.nonzero(wanted)
        owner = slots[row]
        position = self.start[owner] + column
        banned: list[tuple[int, int]] = []
        for i in np.flatnonzero(position < self.min_end[owner]).tolist():
            banned += [(i, token) for token in self._stop[owner[i]].tolist() if token >= 0]
        return SamplingRows(
            self._temperature[owner],
            self._top_k[owner],
            self._top_p[owner],
            self._seed[owner],
            position,
            self._step[owner],
            banned,
            self._min_p[owner],
            self._adjustments_of(slots, owner),
        )

    def _adjustments_of(self, slots: np.ndarray, owner: np.ndarray) -> list[tuple[int, LogitAdjustment]]:
        """By row; few requests have any."""
        adjusted = {slot: item for slot in slots.tolist() if (item := self._adjustments[slot]) is not None}
        if not adjusted:
            return []
        return [(i, adjusted[slot]) for i, slot in enumerate(owner.tolist()) if slot in adjusted]

    def max_logprobs(self, slots: np.ndarray) -> int:
        """The most alternatives that one of the requests wants; -1 when none wants logprobs."""
        return int(self._num_logprobs[slots].max(initial=-1))

    def wants_logprobs(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]"""
        return self._num_logprobs[slots] >= 0

    def apply(
        self,
        slots: np.ndarray,
        predicted: np.ndarray,
        confidence: np.ndarray,
        logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> Emission:
        """One denoising step of R requests.

        Args:
            slots: int64 [R], different ones.
            predicted: int64 [R, B]; confidence: float32 [R, B]; both are read at ``undecided`` positions only.
            logprobs: as in ``Emission``, of the predicted tokens.
        """
        masked: np.ndarray = self.undecided(slots) & (self.tokens[slots] == self.mask_token_id)
        generated = np.arange(self.block_length)[None, :] >= self.first[slots][:, None]
        edits = self._edits[slots]
        scheduled = transfer_counts(self._step[slots], self._steps[slots], self.block_length)
        count = np.where(edits, self._transfer[slots], scheduled)
        chosen = unmask_rows(confidence, masked, self._threshold[slots], count)
        chosen |= edit_rows(
            self.tokens[slots],
            predicted,
            confidence,
            generated & ~masked & edits[:, None],
            self._editing[slots],
        )
        self.tokens[slots] = np.where(chosen, predicted, self.tokens[slots])
        if logprobs is not None:
            self._keep_logprobs(slots, chosen, logprobs)
        self._step[slots] += 1
        done = self._done(slots, np.any(masked, axis=1), np.any(chosen, axis=1))
        emission = self._emit(slots, done)
        self._next(slots[done])
        return emission

    def _done(self, slots: np.ndarray, had_masks: np.ndarray, changed: np.ndarray) -> np.ndarray:
        """Which blocks are finished, bool [R]."""
        left = (self.tokens[slots] == self.mask_token_id) & (
            np.arange(self.block_length)[None, :] >= self.first[slots][:, None]
        )
        masks_left = left.any(axis=1)
        settled = np.logical_not(had_masks | changed)
        # LLaDA2.1: the next pass would only edit; such passes are counted.
        self._post_steps[slots] += self._edits[slots] & ~settled & ~masks_left
        edited = settled | (~masks_left & (self._post_steps[slots] > self._max_post[slots]))
        return np.where(self._edits[slots], edited, ~masks_left | (self._step[slots] >= self._steps[slots]))

    def _emit(self, slots: np.ndarray, done: np.ndarray) -> Emission:
        """A finished block goes out whole (the scheduler cuts it at a stop token and at ``max_tokens``). With early
        stop a LLaDA2.0 block goes out as soon as no mask is left before its stop token, or before the request's end."""
        length, first = self.block_length, self.first[slots]
        column = np.arange(length)[None, :]
        tokens = np.take_along_axis(
            self.tokens[slots], np.minimum(column + first[:, None], length - 1), axis=1
        )
        available = length - first
        inside = column < available[:, None]
        decided = np.where(inside & (tokens == self.mask_token_id), column, length).min(axis=1)
        decided = np.minimum(decided, available)
        stops = (tokens[:, :, None] == self._stop[slots][:, None, :]).any(axis=2)
        stop = np.where(stops & (column < decided[:, None]), column, length).min(axis=1)
        wanted = self.end[slots] - self.start[slots] - first
        early = self._early[slots] & ~self._edits[slots] & ~done
        until = np.minimum(stop + 1, wanted)
        num_tokens = np.where(done, available, np.where(early & (decided >= until), until, 0))
        logprobs = None
        if self._logprobs is not None and (num_tokens > 0).any():
            index = np.minimum(column + first[:, None], length - 1)
            ids, values, ranks = self._logprobs
            logprobs = (
                np.take_along_axis(ids[slots], index[:, :, None], axis=1),
                np.take_along_axis(values[slots], index[:, :, None], axis=1),
                np.take_along_axis(ranks[slots], index, axis=1),
            )
        return Emission(num_tokens, tokens, logprobs)

    def _next(self, slots: np.ndarray) -> None:
        self.previous[slots] = self.tokens[slots]
        self.start[slots] += self.block_length
        self.first[slots] = 0
        self._open(slots)

    def _open(self, slots: np.ndarray) -> None:
        self.tokens[slots] = self.mask_token_id
        self._step[slots] = 0
        self._post_steps[slots] = 0

    def _keep_logprobs(
        self, slots: np.ndarray, chosen: np.ndarray, logprobs: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> None:
        """A token's logprobs are those of the step that decided (or last changed) it."""
        width = logprobs[0].shape[2]
        if self._logprobs is None or self._logprobs[0].shape[2] < width:
            shape = (*self.tokens.shape, width)
            new = (
                np.zeros(shape, dtype=np.int64),
                np.full(shape, -np.inf, dtype=np.float32),
                np.zeros(self.tokens.shape, dtype=np.int64),
            )
            if self._logprobs is not None:
                old = self._logprobs[0].shape[2]
                new[0][:, :, :old], new[1][:, :, :old] = self._logprobs[:2]
                new[2][:] = self._logprobs[2]
            self._logprobs = new
        ids, values, ranks = self._logprobs
        row, column = np.nonzero(chosen)
        owner = slots[row]
        ids[owner, column, :width] = logprobs[0][row, column]
        values[owner, column, :width] = logprobs[1][row, column]
        ranks[owner, column] = logprobs[2][row, column]


class _Extra:
    """Numbers out of a mapping that a client may have filled with anything."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, name: str, default: Any, low: float | None, high: float | None) -> Any:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            return default
        if (low is not None and value < low) or (high is not None and value > high):
            return default
        return value

    def integer(self, name: str, default: Any, low: int | None) -> Any:
        value = self._values.get(name)
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, int) or (low is not None and value < low):
            return default
        return value

    def pairs(self, name: str) -> tuple[tuple[int, float], ...]:
        """(Token id, addend) pairs. An id that the model does not have would fail the step: the engine in front checks
        them (``replicas.engine.validation``)."""
        value = self._values.get(name)
        if not isinstance(value, (list, tuple)):
            return ()
        found = []
        for item in value:
            if isinstance(item, (list, tuple)) and len(item) == 2:
                pair = _Extra({"id": item[0], "value": item[1]})
                token, addend = pair.integer("id", None, 0), pair.number("value", None, -100, 100)
                if token is not None and addend is not None:
                    found.append((token, float(addend)))
        return tuple(found)
