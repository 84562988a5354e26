"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

import torch


def merge_attention(
    output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys.

    ``output_*``: [tokens, heads, head_dim], each normalised over its own keys. ``lse_*``: float32 [tokens, heads],
    natural log of the sum of exp(scores); -inf for no keys. Returns the merged output (dtype of
    ``output_a``) and its log-sum-exp. The weights of the parts are exp(lse - merged lse): two softmaxes
    simply added would have weights that sum to 2.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # Without any key at all both are -inf, and -inf - -inf is NaN: the output is then 0.
    reference = torch.where(torch.isneginf(lse), 0.0, lse)
    weight_a = torch.exp(lse_a - reference)[..., None]
    weight_b = torch.exp(lse_b - reference)[..., None]
    return (output_a * weight_a + output_b * weight_b).to(output_a.dtype), lse
