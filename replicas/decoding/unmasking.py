"""Which masked positions of a block are decided in a denoising step: LLaDA2.0's and LLaDA2.1's rules.

Source: the `generate` functions that come with the LLaDA2.0-mini and LLaDA2.1-mini checkpoints
(inclusionAI, Apache-2.0). Pure functions on what one forward predicts for one block.

Confidences are compared in float32, as the original code does: a threshold such as 0.6 is not the same
number in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replicas.protocol import DiffusionParams


def num_steps(params: DiffusionParams, max_tokens: int, block_length: int) -> int:
    """Denoising steps of a block at most: ``block_length``, or what the original makes of ``steps``."""
    if params.steps is None:
        return block_length
    return min(params.steps, max_tokens // params.minimal_topk)


def transfer_count(step: int, steps: int, block_length: int) -> int:
    """Tokens that step ``step`` (from 0) of ``steps`` must decide at least: an even split of the block, the
    first steps take the remainder. 0 past the last step."""
    if step >= steps:
        return 0
    return block_length // steps + (1 if step < block_length % steps else 0)


def unmask(confidence: Sequence[float], threshold: float, count: int) -> list[int]:
    """Indices of the masked positions to decide now (LLaDA2.0; LLaDA2.1's mask-to-token half).

    Args:
        confidence: of the predicted token, one entry per masked position, in order of position.
        threshold: strict; all above it are decided if they are at least ``count``.
        count: otherwise the ``count`` most confident are (all, when fewer are masked). Equal confidences:
            the leftmost first.
    """
    values = np.asarray(confidence, dtype=np.float32)
    above = np.flatnonzero(values > np.float32(threshold))
    if len(above) >= count:
        return above.tolist()
    best = np.argsort(-values, kind="stable")[:count]
    return sorted(best.tolist())


def edit(
    tokens: Sequence[int], predicted: Sequence[int], confidence: Sequence[float], threshold: float
) -> list[int]:
    """Indices of decided, generated positions whose token is replaced (LLaDA2.1's token-to-token half).

    A position is replaced when another token than the present one is predicted with a confidence above
    ``threshold`` (strict).
    """
    values = np.asarray(confidence, dtype=np.float32)
    changed = np.asarray(tokens) != np.asarray(predicted)
    return np.flatnonzero(changed & (values > np.float32(threshold))).tolist()


def unmask_and_edit(
    block: Sequence[int],
    predicted: Sequence[int],
    confidence: Sequence[float],
    *,
    mask_token_id: int,
    threshold: float,
    editing_threshold: float,
    num_to_transfer: int,
) -> list[tuple[int, int]]:
    """One pass of LLaDA2.1 over the generated positions of a block: the (index, token) changes, in order.

    ``block``, ``predicted`` and ``confidence`` have one entry per generated position; prompt positions of a
    partial first block are never passed in, since they never change.
    """
    masked = [i for i, token in enumerate(block) if token == mask_token_id]
    decided = [i for i, token in enumerate(block) if token != mask_token_id]
    indices: list[int] = []
    if masked:
        chosen = unmask([confidence[i] for i in masked], threshold, num_to_transfer)
        indices += [masked[i] for i in chosen]
    if decided:
        chosen = edit(
            [block[i] for i in decided],
            [predicted[i] for i in decided],
            [confidence[i] for i in decided],
            editing_threshold,
        )
        indices += [decided[i] for i in chosen]
    return [(i, int(predicted[i])) for i in sorted(indices)]
