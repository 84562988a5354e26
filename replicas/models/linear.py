"""Linear layers whose weights lie in memory as the fastest kernel of this machine wants them."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

#: oneDNN lays a weight out for one number of rows. Measured with float32 on AVX2: a layout for 8 rows is the best or
#: nearly the best from 1 to 128 rows (2 to 4 times as fast as the plain weight at 2 to 8 rows).
_ROWS_HINT = 8


class Linear:
    """``x @ weight.T + bias`` for ``x`` [..., in_features]; ``weight``: [out_features, in_features].

    On a CPU the weight is repacked into oneDNN's own layout, and the caller should drop the original: decoding is
    bound by reading weights, and from the plain layout they are read at a fraction of the memory's bandwidth.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = can_pack(weight.device, weight.dtype)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._weight = weight

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features]; a copy where the layer holds it packed."""
        return self._weight.to_dense() if self._packed else self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return F.linear(x, self._weight, self.bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch can run linear layers on weights that are packed once, here and in this dtype."""
    if device.type != "cpu" or not _packing_exists():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_has_fast_bfloat16())


@functools.cache
def cpu_has_fast_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 natively. Elsewhere float32 is several times as fast from a few rows on."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def _packing_exists() -> bool:
    # Internal operators of torch (its compiler emits them): another build may lack them.
    operators = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
