"""Linear layers whose weights lie in memory as the fastest kernels of this machine want them."""

from __future__ import annotations

import functools
import math
from enum import Enum

import torch
import torch.nn.functional as F

from replicas.models.narrow import NarrowWeights

#: oneDNN lays a weight out for one number of rows. Measured with float32 on AVX2: a layout for 8 rows is the best or
#: nearly the best from 1 to 128 rows (2 to 4 times as fast as the plain weight at 2 to 8 rows).
_ROWS_HINT = 8
#: Up to so many rows a float32 product is faster on a 16-bit copy of its weight. Measured on AVX2: 1.6 to 1.9 times as
#: fast with 1 to 4 rows, 1.2 with 8, equal with 16, and 0.75 with 128 and more.
MAX_FEW_ROWS = 12


class Rows(Enum):
    """How many rows a layer gets in one step; it decides which copies of its weight are worth their memory."""

    FEW = "few"  #: one per request, as an output head of next-token prediction; or memory is short
    MANY = "many"  #: prompts and canvases of blocks
    ANY = "any"  #: now prompts, now one token per request


class Linear:
    """``x @ weight.T + bias`` for ``x`` [rows, in_features]; ``weight``: [out_features, in_features].

    On a CPU the weight is repacked, and the caller should drop the original: decoding is bound by reading weights, and
    from the plain layout they are read at a fraction of the memory's bandwidth. Few rows are multiplied by a narrow
    copy of the weight where there can be one (``NarrowWeights``).
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, rows: Rows = Rows.MANY
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._narrow = None if rows is Rows.MANY else NarrowWeights.of(weight[None], bias)
        self._max_narrow_rows = math.inf if rows is Rows.FEW else MAX_FEW_ROWS
        self._packed = can_pack(weight.device, weight.dtype)
        self._weight: torch.Tensor | None = weight
        if self._narrow is not None and rows is Rows.FEW:
            self._packed, self._weight = False, None
        elif self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features]; a copy where the layer holds it packed."""
        if self._weight is None:
            assert self._narrow is not None
            return self._narrow.weights[0]
        return self._weight.to_dense() if self._packed else self._weight

    @property
    def num_copies(self) -> int:
        """Of the weight: 1 or 2."""
        return (self._narrow is not None) + (self._weight is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._narrow is not None and len(x) <= self._max_narrow_rows:
            return self._narrow.product(x)
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        assert self._weight is not None
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
