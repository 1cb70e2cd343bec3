"""The emulated low-precision linear: one function, used by the vLLM plugin and by the reference sampler."""

import torch

from ..formats.schemes import TensorScheme
from ..quantize import quantize_activations


def emulated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activations: TensorScheme | None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y = Q(x) W^T + b with the values that a low-precision kernel multiplies, accumulated in `x.dtype`.

    Args:
        x: (..., in) activations.
        weight: (out, in) dequantized weight in `x.dtype`.
        bias: (out,) or None.
        activations: scheme of Q; None leaves `x` alone. NaN and infinity come out as NaN.
        input_scale: calibrated scale of the whole input, fp32 (1,); None computes scales from `x`.
    """
    if activations is not None:
        x = quantize_activations(x, activations, input_scale)
    return torch.nn.functional.linear(x, weight, bias)


def quantize_heads(x: torch.Tensor, kv_cache: str, head_size: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round keys or values as they enter the cache.

    Args:
        x: (..., heads * head_size) or (..., heads, head_size).
        kv_cache: one of `rlq.formats.schemes.KV_CACHES`.
        head_size: elements that share a scale, where scales are computed.
        scale: calibrated scale of all of them, fp32 (1,), for the `tensor` caches.
    """
    element, _, granularity = kv_cache.partition(".")
    heads = x.reshape(-1, head_size)
    return quantize_activations(heads, TensorScheme(element, granularity or "token"), scale).view(x.shape)
