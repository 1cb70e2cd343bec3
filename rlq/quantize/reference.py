"""Reference quantizers in plain torch: nearest, ties to even, saturating, scale = amax / max_finite."""

import torch

from ..errors import ConfigError, SnapshotError
from ..schemes import TensorScheme
from .tensor import QuantizedTensor

# What an all-zero row divides by; compressed-tensors uses the same, so scales are equal bit for bit.
ZERO_ROW_SCALE = torch.finfo(torch.float32).eps


def quantize(x: torch.Tensor, scheme: TensorScheme | str) -> QuantizedTensor:
    """Quantize a floating-point tensor: scale = amax(|row|) / max_finite in fp32, codes = round(x / scale).

    Rows run along the last dimension (`channel` of an (out, in) weight, `token` of an activation). Both divisions are
    true fp32 divisions, rounding is to nearest with ties to even, out-of-range quotients saturate; a zero row gives
    zero codes and a finite scale.

    Args:
        x: (..., K) bf16, fp16 or fp32.
        scheme: tensor scheme or its name, such as `fp8.channel`.

    Raises:
        ConfigError: `x` is not a floating-point tensor of at least one dimension.
        SnapshotError: `x` holds NaN or infinity.
    """
    scheme = TensorScheme.parse(scheme) if isinstance(scheme, str) else scheme
    if not x.is_floating_point() or x.ndim == 0:
        raise ConfigError(
            f"cannot quantize a {x.ndim}-d {x.dtype} tensor; pass bf16, fp16 or fp32 with a last dimension"
        )
    quantized = encode(x, scheme)
    # A scale is NaN or infinite exactly when some element of its row is, so the check costs nothing extra.
    if not torch.isfinite(quantized.scale).all():
        raise SnapshotError(
            f"cannot quantize: {int((~torch.isfinite(x)).sum())} non-finite values in shape {tuple(x.shape)}"
        )
    return quantized


def encode(x: torch.Tensor, scheme: TensorScheme) -> QuantizedTensor:
    """`quantize` without the checks: a row that holds NaN or infinity dequantizes to NaN."""
    element = scheme.element
    x = x.to(torch.float32)
    amax = (
        torch.linalg.vector_norm(x, ord=float("inf"), dim=-1, keepdim=True)
        if x.numel()
        else x.new_zeros(*x.shape[:-1], 1)
    )
    # A device tensor as divisor: dividing by a Python scalar becomes a multiplication by its reciprocal on CUDA.
    scale = amax / torch.tensor(element.max_finite, dtype=torch.float32, device=x.device)
    scale = torch.where(scale == 0, ZERO_ROW_SCALE, scale)
    # torch versions differ in how they cast out-of-range values to float8, so saturate first.
    codes = (x / scale).clamp_(-element.max_finite, element.max_finite).to(element.dtype)
    return QuantizedTensor(codes, scale, scheme)


def fake_quantize(x: torch.Tensor, scheme: TensorScheme | str) -> torch.Tensor:
    """Round `x` to the values that `scheme` can hold; bit-equal to `quantize(x, scheme).dequantize(x.dtype)`."""
    return quantize(x, scheme).dequantize(x.dtype)
