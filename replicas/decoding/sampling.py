"""How a token is drawn from a row of logits: pure functions, vectorised over rows.

Rows of one call may belong to different requests, each with its own parameters. A draw uses one number
that depends on (seed, position, step) only, so what else is in the batch cannot change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from replicas.decoding.adjustments import LogitAdjustment

#: A full sort of a large vocabulary is slow; rows whose ``top_k`` is at most this take ``torch.topk``.
_TOPK_LIMIT = 1024
_MIN_TEMPERATURE = 1e-5


@dataclass(slots=True)
class SamplingRows:
    """Parameters of R rows of logits, one entry per row: lists that grow, or numpy arrays [R].

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed``, ``position`` and ``step``
    key the row's draw. ``banned`` holds (row, token id) pairs that must not be chosen; ``adjustments`` are (row, what
    is done to its logits) pairs.
    """

    temperature: Any = field(default_factory=list)
    top_k: Any = field(default_factory=list)
    top_p: Any = field(default_factory=list)
    seed: Any = field(default_factory=list)
    position: Any = field(default_factory=list)
    step: Any = field(default_factory=list)
    banned: Any = field(default_factory=list)
    min_p: Any = field(default_factory=list)
    adjustments: list[tuple[int, LogitAdjustment]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.temperature)

    def append(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        position: int,
        step: int,
        banned: Sequence[int] = (),
        min_p: float = 0.0,
        adjustment: LogitAdjustment | None = None,
    ) -> None:
        row = len(self.temperature)
        self.temperature.append(temperature)
        self.top_k.append(top_k)
        self.top_p.append(top_p)
        self.seed.append(seed)
        self.position.append(position)
        self.step.append(step)
        self.banned.extend((row, token) for token in banned)
        self.min_p.append(min_p)
        if adjustment is not None:
            self.adjustments.append((row, adjustment))

    def slice(self, start: int, end: int) -> SamplingRows:
        """Rows ``start`` to ``end`` (exclusive)."""
        return SamplingRows(
            self.temperature[start:end],
            self.top_k[start:end],
            self.top_p[start:end],
            self.seed[start:end],
            self.position[start:end],
            self.step[start:end],
            [(row - start, token) for row, token in self.banned if start <= row < end],
            self.min_p[start:end],
            [(row - start, item) for row, item in self.adjustments if start <= row < end],
        )


def apply_grammars(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Takes what grammars do not allow out of float32 ``logits`` [R, V], in place. Logprobs are those of the result."""
    for row, adjustment in rows.adjustments:
        _apply_grammar(logits[row], adjustment)


def select_tokens(
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    mask_token_id: int | None = None,
    with_confidence: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chooses a token for every row; returns (tokens int64 [R], confidence float32 [R]). Grammars were applied before.

    Args:
        logits: float32 [R, V]; may be overwritten.
        rows: parameters of the R rows.
        mask_token_id: a token that is never chosen (block diffusion: a mask that is "predicted" would stay
            masked, and under LLaDA2.1's rule could loop for ever). In greedy rows its probability stays in
            the normaliser, so the confidences of all other tokens are those of the original code.
        with_confidence: False gives None instead, and spares greedy rows the normaliser.

    Confidence is the chosen token's probability in the distribution it was drawn from: after temperature,
    top-k and top-p, or the plain softmax for greedy rows (original LLaDA2 `generate`).
    """
    for row, adjustment in rows.adjustments:
        _apply_bias_and_penalties(logits[row], adjustment)
    if len(rows.banned):
        index = torch.as_tensor(np.asarray(rows.banned), dtype=torch.int64, device=logits.device)
        logits[index[:, 0], index[:, 1]] = -torch.inf
    sampled = np.flatnonzero(np.asarray(rows.temperature) > 0)
    if not with_confidence:
        if mask_token_id is not None:
            logits[:, mask_token_id] = -torch.inf
        tokens = logits.argmax(dim=-1)
        if len(sampled):
            tokens[sampled] = _draw_rows(logits[sampled], rows, sampled, mask_token_id)[0]
        return tokens, None
    if not len(sampled):
        return greedy(logits, mask_token_id=mask_token_id)
    if len(sampled) == len(rows):
        return _draw_rows(logits, rows, sampled, mask_token_id)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    confidence = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    plain = np.flatnonzero(np.asarray(rows.temperature) <= 0)
    tokens[plain], confidence[plain] = greedy(logits[plain], mask_token_id=mask_token_id)
    tokens[sampled], confidence[sampled] = _draw_rows(logits[sampled], rows, sampled, mask_token_id)
    return tokens, confidence


def greedy(logits: torch.Tensor, *, mask_token_id: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row and its softmax probability: (int64 [R], float32 [R]) of float [R, V]."""
    normaliser = torch.logsumexp(logits, dim=-1)
    if mask_token_id is not None:
        logits[:, mask_token_id] = -torch.inf
    best, tokens = logits.max(dim=-1)
    return tokens, torch.exp(best - normaliser)


def filtered_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution that tokens are drawn from: float32 [R, V], rows sum to 1.

    Order of the original LLaDA2 `generate`: divide by temperature, keep the ``top_k`` best, then the smallest
    set whose cumulative probability passes ``top_p`` (the best token always), renormalise. Before the two, as in vLLM,
    ``min_p``: tokens below that share of the best one's probability go.

    Args:
        logits: float32 [R, V].
        temperature: float32 [R], all > 0. top_k: int64 [R], 0 is off. top_p: float32 [R], 1 is off.
        min_p: float32 [R], 0 is off; None is off in all rows.
    """
    # Relative to the best logit, and not below a floor: a tiny temperature must not overflow to inf - inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=_MIN_TEMPERATURE)[:, None]
    if min_p is not None:
        scaled = scaled.masked_fill(scaled < min_p.log()[:, None], -torch.inf)
    vocab_size = logits.shape[-1]
    k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    if not bool(((k < vocab_size) | (top_p < 1)).any()):
        return torch.softmax(scaled, dim=-1)
    width = int(k.max())
    if width <= min(_TOPK_LIMIT, vocab_size):
        ordered, index = torch.topk(scaled, width, dim=-1, sorted=True)
    else:
        ordered, index = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank[None, :] >= k[:, None], -torch.inf)
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(dim=-1) - probs
    drop = (before > top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)[None, :]
    probs = torch.softmax(ordered.masked_fill(drop, -torch.inf), dim=-1)
    return torch.zeros_like(scaled).scatter_(-1, index, probs)


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw in token-id order: int64 [R] for probabilities [R, V] and uniforms float64 [R].

    One uniform against a float64 cumulative sum: noise of the last bits in the logits (another batch, another
    kernel) moves the borders by as much and no more, where a sort by probability would swap near ties.
    """
    cdf = probs.double().cumsum(dim=-1)
    total = cdf[:, -1]
    # A product that rounds up to the total would fall off the end.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    # A row of NaN has no place for it, and would end the step of all rows as an index out of range.
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def counter_uniforms(seed: Sequence[int], position: Sequence[int], step: Sequence[int]) -> np.ndarray:
    """One uniform in [0, 1) per (seed, position, step): float64 [R].

    Stateless: three rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014), one per key part, so that
    neither the order of the draws nor the other rows of the batch matter.
    """
    state = np.zeros(len(seed), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (seed, position, step):
            key = np.array([int(value) & 0xFFFFFFFFFFFFFFFF for value in part], dtype=np.uint64)
            state = _mix((state ^ key) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural-log probabilities under the plain softmax (no temperature, no filter, as vLLM reports them).

    Args:
        logits: float32 [R, V]; tokens: int64 [R].

    Returns:
        (chosen float32 [R], top token ids int64 [R, num_top], their logprobs float32 [R, num_top]).
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    top, index = torch.topk(logprobs, min(num_top, logits.shape[-1]), dim=-1)
    return chosen, index, top


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _draw_rows(
    logits: torch.Tensor, rows: SamplingRows, picked: np.ndarray, mask_token_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws for ``logits`` [len(picked), V], whose parameters are the ``picked`` entries of ``rows``."""
    device = logits.device
    min_p = np.asarray(rows.min_p)
    if mask_token_id is not None:
        logits[:, mask_token_id] = -torch.inf
    probs = filtered_probs(
        logits,
        torch.as_tensor(np.asarray(rows.temperature)[picked], dtype=torch.float32, device=device),
        torch.as_tensor(np.asarray(rows.top_k)[picked], dtype=torch.int64, device=device),
        torch.as_tensor(np.asarray(rows.top_p)[picked], dtype=torch.float32, device=device),
        torch.as_tensor(min_p[picked], dtype=torch.float32, device=device) if min_p.any() else None,
    )
    uniforms = counter_uniforms(
        [rows.seed[row] for row in picked],
        [rows.position[row] for row in picked],
        [rows.step[row] for row in picked],
    )
    tokens = draw(probs, torch.from_numpy(uniforms).to(device))
    return tokens, probs.gather(-1, tokens[:, None])[:, 0]


def _apply_grammar(row: torch.Tensor, adjustment: LogitAdjustment) -> None:
    """Takes what the grammar does not allow out of float32 ``row`` [V], in place."""
    if adjustment.allowed is None:
        return
    bits = np.unpackbits(adjustment.allowed.view(np.uint8), bitorder="little")[: row.shape[0]]
    forbidden = torch.from_numpy(bits == 0).to(row.device)
    row[: len(bits)].masked_fill_(forbidden, -torch.inf)
    row[len(bits) :] = -torch.inf


def _apply_bias_and_penalties(row: torch.Tensor, adjustment: LogitAdjustment) -> None:
    """Changes float32 ``row`` [V] in place."""

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(row.device)

    if adjustment.bias is not None:
        ids, values = adjustment.bias
        row.index_add_(0, on_device(ids), on_device(values))
    penalties = adjustment.penalties
    if penalties is None:
        return
    if penalties.repetition != 1:
        seen = on_device(penalties.seen)
        logits = row[seen]
        penalized = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
        row[seen] = penalized.clamp(max=torch.finfo(row.dtype).max)  # inf - inf would be no number
    if len(penalties.generated):
        taken = penalties.frequency * penalties.counts + penalties.presence
        row.index_add_(0, on_device(penalties.generated), -on_device(taken.astype(np.float32)))
