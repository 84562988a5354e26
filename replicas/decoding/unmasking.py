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
    return int(transfer_counts(np.array([step]), np.array([steps]), block_length)[0])


def transfer_counts(step: np.ndarray, steps: np.ndarray, block_length: int) -> np.ndarray:
    """``transfer_count`` of R requests: int64 [R]."""
    share, rest = np.divmod(block_length, np.maximum(steps, 1))
    return np.where(step < steps, share + (step < rest), 0)


def unmask_rows(
    confidence: np.ndarray, masked: np.ndarray, threshold: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Which masked positions of R blocks are decided now (LLaDA2.0; LLaDA2.1's mask-to-token half): bool [R, B].

    Args:
        confidence: float32 [R, B], of the predicted token; not read where nothing is masked.
        masked: bool [R, B].
        threshold: float32 [R], strict; all above it are decided if they are at least ``count``.
        count: int64 [R]; otherwise the ``count`` most confident are (all, when fewer are masked). Equal
            confidences: the leftmost first.
    """
    above = masked & (confidence > threshold[:, None])
    # Last in the order: what is not masked; before it what is not a number, or a block would never be finished.
    key = np.where(masked, np.nan_to_num(-confidence, nan=float(np.finfo(np.float32).max)), np.inf)
    order = np.argsort(key, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(masked.shape[1])[None, :], axis=1)
    enough = above.sum(axis=1) >= count
    return np.where(enough[:, None], above, masked & (rank < count[:, None]))


def edit_rows(
    tokens: np.ndarray,
    predicted: np.ndarray,
    confidence: np.ndarray,
    editable: np.ndarray,
    threshold: np.ndarray,
) -> np.ndarray:
    """Which decided, generated positions of R blocks get another token (LLaDA2.1's token-to-token half): bool [R, B].

    A position is replaced when another token than the present one is predicted with a confidence above
    ``threshold`` (float32 [R], strict). ``editable``: bool [R, B], the decided positions that were generated.
    """
    return editable & (tokens != predicted) & (confidence > threshold[:, None])


def unmask(confidence: Sequence[float], threshold: float, count: int) -> list[int]:
    """``unmask_rows`` for one block: indices out of its masked positions, in order of position."""
    values = np.asarray(confidence, dtype=np.float32)[None, :]
    chosen = unmask_rows(
        values, np.ones(values.shape, dtype=bool), np.array([threshold], dtype=np.float32), np.array([count])
    )
    return np.flatnonzero(chosen[0]).tolist()


def edit(
    tokens: Sequence[int], predicted: Sequence[int], confidence: Sequence[float], threshold: float
) -> list[int]:
    """``edit_rows`` for one block: indices out of its decided, generated positions."""
    values = np.asarray(confidence, dtype=np.float32)[None, :]
    chosen = edit_rows(
        np.asarray(tokens)[None, :],
        np.asarray(predicted)[None, :],
        values,
        np.ones(values.shape, dtype=bool),
        np.array([threshold], dtype=np.float32),
    )
    return np.flatnonzero(chosen[0]).tolist()


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
