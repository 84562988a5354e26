"""What a request asks to be done to its logits before a token is chosen: grammar, bias, penalties.

Rules and order are vLLM's: the grammar's mask, then (the distribution that logprobs report ends here) the bias, then
the penalties. They are applied row by row (``sampling``), for rows that ask for any of it are few. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """Of one row of logits [V].

    ``allowed``: uint32 [ceil(V / 32)], bit i of word w is token 32 w + i; None allows all. ``bias``: (int64 [K] token
    ids, float32 [K] addends). ``penalties``: see ``Penalties``.
    """

    allowed: np.ndarray | None = None
    bias: tuple[np.ndarray, np.ndarray] | None = None
    penalties: Penalties | None = None


@dataclass(frozen=True, slots=True)
class Penalties:
    """``generated`` int64 [G] are the different tokens generated so far and ``counts`` int64 [G] how often each was;
    ``seen`` int64 [S] are the different ones of prompt and output.

    ``frequency`` times its count, and ``presence`` once, are taken from a generated token's logit (OpenAI's rule).
    Logits of seen tokens are divided by ``repetition`` if positive, multiplied otherwise (Keskar et al. 2019, CTRL).
    """

    generated: np.ndarray
    counts: np.ndarray
    seen: np.ndarray
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0

    @classmethod
    def of(
        cls,
        tokens: list[int],
        num_prompt_tokens: int,
        *,
        frequency: float = 0.0,
        presence: float = 0.0,
        repetition: float = 1.0,
    ) -> Penalties:
        """For a request with ``tokens``, of which the first ``num_prompt_tokens`` were not generated."""
        everything = np.asarray(tokens, dtype=np.int64)
        generated, counts = np.unique(everything[num_prompt_tokens:], return_counts=True)
        return cls(generated, counts, np.unique(everything), frequency, presence, repetition)


def make_bias(pairs: tuple[tuple[int, float], ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """``LogitAdjustment.bias`` of (token id, addend) pairs."""
    if not pairs:
        return None
    ids, values = zip(*pairs, strict=True)
    return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
