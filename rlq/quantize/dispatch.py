"""Chooses between the reference and a device's fast kernels, which are bit-identical to it."""

import functools
import importlib.util

import torch

from ..schemes import TensorScheme
from .reference import encode

FP8_TOKEN = TensorScheme.parse("fp8.token")


@functools.cache
def cpu_kernels():
    """The numba kernels, or None where numba is not installed; imported late because it takes a second."""
    if importlib.util.find_spec("numba") is None:
        return None
    from . import cpu

    return cpu


def quantize_activations(x: torch.Tensor, scheme: TensorScheme) -> torch.Tensor:
    """Round activations to the values that `scheme` can hold, for an emulated kernel.

    Equal to `fake_quantize`, except that non-finite values are not refused: they become NaN, as they would downstream
    of a real kernel, and never a finite number.

    Args:
        x: (..., K) bf16, fp16 or fp32.
        scheme: tensor scheme, computed dynamically.
    """
    if x.device.type != "cpu" or scheme != FP8_TOKEN or (kernels := cpu_kernels()) is None:
        return encode(x, scheme).dequantize(x.dtype)
    if x.dtype != torch.float32 or x.ndim != 2 or x.requires_grad:  # an engine's activations are none of these
        rows = x.detach().to(torch.float32).reshape(-1, x.shape[-1])
        return torch.from_numpy(kernels.fake_quantize_fp8_token(rows.numpy())).view(x.shape).to(x.dtype)
    return torch.from_numpy(kernels.fake_quantize_fp8_token(x.numpy()))
