"""The emulated low-precision linear: one function, used by the vLLM plugin and by the reference sampler."""

import torch

from .quantize import quantize_activations
from .schemes import TensorScheme


def emulated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activations: TensorScheme | None,
) -> torch.Tensor:
    """Compute y = Q(x) W^T + b with the values that a low-precision kernel multiplies, accumulated in `x.dtype`.

    Args:
        x: (..., in) activations.
        weight: (out, in) dequantized weight in `x.dtype`.
        bias: (out,) or None.
        activations: scheme of Q, computed dynamically; None leaves `x` alone. NaN and infinity come out as NaN.
    """
    if activations is not None:
        x = quantize_activations(x, activations)
    return torch.nn.functional.linear(x, weight, bias)
