"""How far a quantized tensor is from the tensor it came from."""

import math
from dataclasses import dataclass

import torch

from .reference import as_rows, row_chunks, unpack
from .tensor import QuantizedTensor


@dataclass(frozen=True)
class Quality:
    """Error of one quantized tensor."""

    sqnr_db: float
    """Signal to quantization noise, 10 log10(sum x^2 / sum (x - q)^2); infinite without an error."""
    max_error: float
    """Largest |x - q|."""
    saturated_frac: float
    """Share of elements beyond the largest value that their scale reaches."""
    zero_frac: float
    """Share of elements that were not zero and became zero."""


def measure(x: torch.Tensor, q: QuantizedTensor) -> Quality:
    """Compare `x` with its quantized form, in float64 sums over float32 differences.

    Args:
        x: (..., K), the tensor that `q` was made from.
        q: its codes and scales.
    """
    rows, values = as_rows(x), as_rows(q.dequantize())
    codes = q.codes.reshape(rows.shape[0], -1)
    largest = q.scheme.element.values.abs() == q.scheme.element.max_finite
    signal = noise = worst = 0.0
    saturated = zeroed = 0
    for top, bottom in row_chunks(rows.shape, 1):
        part, value = rows[top:bottom].float(), values[top:bottom]
        error = (part - value).abs()
        signal += float(part.double().square().sum())
        noise += float(error.double().square().sum())
        worst = max(worst, float(error.max())) if error.numel() else worst
        at_top = largest[unpack(codes[top:bottom], q.scheme.element, rows.shape[1]).int()]
        saturated += int((at_top & (part.abs() > value.abs())).sum())
        zeroed += int(((value == 0) & (part != 0)).sum())
    count = max(x.numel(), 1)
    sqnr = 10 * math.log10(signal / noise) if noise and signal else math.inf
    return Quality(sqnr, worst, saturated / count, zeroed / count)
