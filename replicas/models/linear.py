"""Linear layers whose weights lie in memory as the fastest kernels of this machine want them."""

from __future__ import annotations

import functools
import math
from enum import Enum

import torch
import torch.nn.functional as F

#: oneDNN lays a weight out for one number of rows. Measured with float32 on AVX2: a layout for 8 rows is the best or
#: nearly the best from 1 to 128 rows (2 to 4 times as fast as the plain weight at 2 to 8 rows).
_ROWS_HINT = 8
#: Up to so many rows a float32 product is faster on a 16-bit copy of its weight. Measured on AVX2: 1.6 to 1.9 times as
#: fast with 1 to 4 rows, 1.2 with 8, equal with 16, and 0.75 with 128 and more.
MAX_FEW_ROWS = 12


class Rows(Enum):
    """How many rows a layer gets in one step; it decides which copies of its weight are worth their memory."""

    FEW = "few"  #: one per request: an output head of next-token prediction
    MANY = "many"  #: prompts and canvases of blocks
    ANY = "any"  #: now prompts, now one token per request


class Linear:
    """``x @ weight.T + bias`` for ``x`` [rows, in_features]; ``weight``: [out_features, in_features].

    On a CPU the weight is repacked, and the caller should drop the original: decoding is bound by reading weights, and
    from the plain layout they are read at a fraction of the memory's bandwidth. Where float32 is computed with weights
    that were stored in 16 bits, few rows are multiplied by a 16-bit copy: the same numbers, half the bytes.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, rows: Rows = Rows.MANY
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._narrow = None if rows is Rows.MANY else NarrowWeight.of(weight, bias)
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
            return self._narrow.weight
        return self._weight.to_dense() if self._packed else self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._narrow is not None and len(x) <= self._max_narrow_rows:
            return self._narrow(x)
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        assert self._weight is not None
        return F.linear(x, self._weight, self.bias)


class NarrowWeight:
    """A float32 weight whose numbers fit in 16 bits, for FBGEMM's kernel: it reads float16, and multiplies and adds in
    float32.

    bfloat16 has a wider range than float16, so the weight is scaled by a power of two (exact, and undone on the
    product) that puts its largest number just below 2^16. Numbers down to 2^-29 of the largest one are then held
    exactly, and smaller ones to within 2^-40 of it: far below what float32 rounds off each sum.
    """

    def __init__(self, packed: torch.ScriptObject, scale: float, *, scale_input: bool) -> None:
        self._packed, self._scale = packed, scale
        self._unscale = torch.tensor(1.0 / scale)
        self._scale_input = scale_input

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NarrowWeight | None:
        """None where torch has no such kernel, and for a weight that was not stored in 16 bits."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _narrow_kernel_exists():
            return None
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if not 0.0 < largest < math.inf:
            return None
        exponent = 16 - math.frexp(largest)[1]
        scale = 2.0**exponent
        if not 0.0 < 1.0 / scale < math.inf:
            return None
        # Piece by piece: the first one tells most weights of true float32, and no second copy is needed.
        for piece in weight.split(max(1, (1 << 20) // weight.shape[1])):
            scaled = piece * scale
            if not bool((scaled - scaled.half()).abs().max() <= 2.0**-25):
                return None
        # The scale is undone where there are fewer numbers to multiply.
        scale_input = weight.shape[1] < weight.shape[0]
        if bias is not None and not scale_input:
            bias = bias * scale
        packed = torch.ops.quantized.linear_prepack_fp16(weight * scale, bias)
        return cls(packed, scale, scale_input=scale_input)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], a copy."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight / self._scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._scale_input:
            x = x * self._unscale
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product if self._scale_input else product.mul_(self._unscale)


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


@functools.cache
def _narrow_kernel_exists() -> bool:
    # Builds without FBGEMM (other CPUs than x86) have the operators, but nothing behind them.
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.eye(8), None)
        return torch.equal(torch.ops.quantized.linear_dynamic_fp16(torch.eye(8), packed), torch.eye(8))
    except (RuntimeError, AttributeError):
        return False
