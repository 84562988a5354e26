"""Float32 products with weights that were stored in 16 bits: the same numbers, half the bytes to read.

On CPUs without 16-bit arithmetic, checkpoints in bfloat16 are computed in float32, and decoding is bound by reading
weights. FBGEMM's kernel reads float16, and multiplies and adds in float32.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import Any, List  # noqa: UP035 - TorchScript reads annotations, and knows this one only

import torch

#: Of a packed weight, checked at once for numbers that do not fit.
_PIECE = 1 << 20
#: The script compiler keeps its types in globals.
_SCRIPTING = threading.Lock()


class NarrowWeights:
    """Weights of one or of several layers of equal shape, held as float16 times a power of two.

    bfloat16 has a wider range than float16, so they are scaled (exactly, and undone on the product) so that the largest
    number is just below 2^16. Numbers down to 2^-29 of the largest one are then held exactly, and smaller ones to
    within 2^-40 of it: far below what float32 rounds off each sum.
    """

    def __init__(self, packed: list[torch.ScriptObject], scale: float, *, scale_input: bool) -> None:
        self._packed, self._scale = packed, scale
        self._unscale = torch.tensor(1.0 / scale)
        self._scale_input = scale_input
        self._product, self._products = _script(_Product(packed[0])), _script(_Products(packed))

    @classmethod
    def of(cls, weights: torch.Tensor, bias: torch.Tensor | None = None) -> NarrowWeights | None:
        """For ``weights`` [layers, out_features, in_features], and the ``bias`` [out_features] of a single one.

        None where torch has no such kernel, and for weights that were not stored in 16 bits.
        """
        if weights.device.type != "cpu" or weights.dtype != torch.float32 or not narrow_kernel_exists():
            return None
        largest = float(weights.abs().max()) if weights.numel() else 0.0
        if not 0.0 < largest < math.inf:
            return None
        scale = 2.0 ** (16 - math.frexp(largest)[1])
        if not 0.0 < 1.0 / scale < math.inf:
            return None
        # Piece by piece: the first one tells most weights of true float32.
        for piece in weights.flatten(0, 1).split(max(1, _PIECE // weights.shape[2])):
            scaled = piece * scale
            if not bool((scaled - scaled.half()).abs().max() <= 2.0**-25):
                return None
        # The scale is undone where there are fewer numbers to multiply.
        scale_input = weights.shape[2] < weights.shape[1]
        if bias is not None and not scale_input:
            bias = bias * scale
        packed = [torch.ops.quantized.linear_prepack_fp16(weight * scale, bias) for weight in weights]
        return cls(packed, scale, scale_input=scale_input)

    @property
    def weights(self) -> torch.Tensor:
        """[layers, out_features, in_features], a copy."""
        return torch.stack([torch.ops.quantized.linear_unpack_fp16(p)[0] for p in self._packed]) / self._scale

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Through the first layer: [rows, out_features] of [rows, in_features]."""
        if self._scale_input:
            return self._product(x * self._unscale)
        return self._product(x).mul_(self._unscale)

    def products(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The first ``counts[0]`` rows of ``x`` through the first layer, and so on: [rows, out_features]."""
        if self._scale_input:
            return self._products(x * self._unscale, counts)
        return self._products(x, counts).mul_(self._unscale)


# From Python, a call with a packed weight takes 40 us whatever its size (torch 2.13 looks up modules to convert the
# argument); from TorchScript, where the weight is an attribute, the first takes 15 us, and each further one 2 us.


class _Product(torch.nn.Module):
    def __init__(self, packed: torch.ScriptObject) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class _Products(torch.nn.Module):
    def __init__(self, packed: list[torch.ScriptObject]) -> None:
        super().__init__()
        element: Any = torch.classes.quantized.LinearPackedParamsBase
        self.packed = torch.jit.Attribute(packed, List[element])  # noqa: UP006

    def forward(self, x: torch.Tensor, counts: List[int]) -> torch.Tensor:  # noqa: UP006
        parts: List[torch.Tensor] = []  # noqa: UP006
        start = 0
        for i in range(len(counts)):
            end = start + counts[i]
            if end > start:
                parts.append(torch.ops.quantized.linear_dynamic_fp16(x[start:end], self.packed[i]))
            start = end
        return torch.cat(parts) if parts else torch.ops.quantized.linear_dynamic_fp16(x, self.packed[0])


def _script(module: torch.nn.Module) -> torch.jit.ScriptModule:
    with _SCRIPTING, warnings.catch_warnings():
        # Deprecated, and without a successor that needs no compiler on the machine.
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


@functools.cache
def narrow_kernel_exists() -> bool:
    """Whether this build of torch has the kernel for this CPU: those without FBGEMM (other CPUs than x86) have the
    operators, but nothing behind them."""
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.eye(8), None)
        weights = NarrowWeights([packed, packed], 1.0, scale_input=False)
        return torch.equal(weights.products(torch.eye(8), [4, 4]), torch.eye(8))
    except (RuntimeError, AttributeError):
        return False
