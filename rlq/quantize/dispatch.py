"""The public functions: checks, then the fastest implementation for the device. All of them are bit-identical."""

import functools
import importlib.util
import math

import torch

from ..errors import ConfigError, SnapshotError
from ..formats.schemes import TensorScheme
from . import reference
from .reference import spans_tensor, tensor_scale
from .tensor import QuantizedTensor


def quantize(
    x: torch.Tensor, scheme: TensorScheme | str, *, amax: torch.Tensor | float | None = None
) -> QuantizedTensor:
    """Quantize a floating-point tensor; formulas in `rlq.quantize.reference`.

    Rows run along the last dimension (`channel` of an (out, in) weight, `token` of an activation); leading dimensions
    are rows too. Any memory layout and size is taken; tiles at the end of a row or matrix may be partial.

    Args:
        x: (..., K) bf16, fp16 or fp32.
        scheme: tensor scheme or its name, such as `fp8.channel`.
        amax: largest magnitude that the tensor's scale has to cover, for schemes with a scale that spans the tensor
            (`tensor` granularity, NVFP4): shared by fused layers, or calibrated. Default: that of `x`.

    Raises:
        ConfigError: `x` is not a floating-point tensor of at least one dimension, or `amax` means nothing for `scheme`.
        SnapshotError: `x` or `amax` holds NaN or infinity.
    """
    scheme = _parse(scheme) if isinstance(scheme, str) else scheme
    if not x.is_floating_point() or x.ndim == 0:
        raise ConfigError(
            f"cannot quantize a {x.ndim}-d {x.dtype} tensor; pass bf16, fp16 or fp32 with a last dimension"
        )
    if amax is not None and not spans_tensor(scheme):
        raise ConfigError(f"{scheme} has no scale that spans a tensor, so amax means nothing; leave it out")
    given = None
    if spans_tensor(scheme):
        own = largest_magnitude(x)
        if not math.isfinite(own.item()):
            raise refusal(x)
        wanted = own if amax is None else torch.as_tensor(amax, dtype=torch.float32, device=x.device).reshape(1)
        if not math.isfinite(wanted.item()):
            raise SnapshotError(f"amax is {wanted.item()}; it has to be finite")
        given = tensor_scale(wanted, scheme)
    quantized = encode(x, scheme, given)
    if given is None:
        check_scales(quantized, x)
    return quantized


_parse = functools.lru_cache(TensorScheme.parse)


def fake_quantize(
    x: torch.Tensor, scheme: TensorScheme | str, *, amax: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Round `x` to the values that `scheme` can hold; bit-equal to `quantize(x, scheme).dequantize(x.dtype)`."""
    return quantize(x, scheme, amax=amax).dequantize(x.dtype)


def quantize_activations(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None = None) -> torch.Tensor:
    """Round activations to the values that `scheme` can hold, for an emulated kernel.

    Like `fake_quantize`, with two differences: NaN and infinity are not refused but become NaN, as they would
    downstream of a real kernel; and NVFP4's global scale is taken per row, so that a completion does not depend on
    the others in its batch.

    Args:
        x: (..., K) bf16, fp16 or fp32.
        scheme: tensor scheme.
        given: calibrated scale, fp32 (1,): `scale` of `tensor` granularity, `global_scale` of NVFP4. None computes it.
    """
    fast = None if scheme.granularity.startswith("block") else _encoder(x, scheme)
    if fast is None:
        return reference.encode_activations(x, scheme, given)
    return fast.fake_quantize_rows(x, scheme, given)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """amax(|x|), fp32 (1,); not finite where some element is not, 0 for an empty tensor."""
    fast = _encoder(x, TensorScheme("fp8", "tensor"))
    return reference.largest_magnitude(x) if fast is None else fast.largest_magnitude(x)


def encode(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> QuantizedTensor:
    """See `rlq.quantize.reference.encode`."""
    fast = _encoder(x, scheme)
    return reference.encode(x, scheme, given) if fast is None else fast.encode(x, scheme, given)


def decode(q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """See `rlq.quantize.reference.decode`."""
    fast = _cpu(q.codes)
    if fast is None and q.codes.device.type == "cuda" and (cuda := _load_cuda()) is not None:
        fast = cuda if cuda.can_decode(q, dtype) else None
    return reference.decode(q, dtype) if fast is None or not q.codes.numel() else fast.decode(q, dtype)


def _encoder(x: torch.Tensor, scheme: TensorScheme):
    """The fast path that takes `x` under `scheme`, or None."""
    if x.device.type == "cuda":
        cuda = _load_cuda()
        return cuda if cuda is not None and cuda.can_encode(scheme, x) else None
    fast = _cpu(x)
    return fast if fast is not None and fast.can_encode(scheme, x.shape) else None


def _cpu(x: torch.Tensor):
    """The numba path for a CPU tensor, or None; imported late because numba takes a second."""
    return _load_cpu() if x.device.type == "cpu" else None


@functools.cache
def _load_cpu():
    if importlib.util.find_spec("numba") is None:
        return None
    from .cpu import launch as cpu

    return cpu


@functools.cache
def _load_cuda():
    if importlib.util.find_spec("triton") is None:
        return None
    from .gpu import launch as cuda

    return cuda


def check_scales(q: QuantizedTensor, x: torch.Tensor) -> None:
    """Refuse what `x` became if it holds NaN or infinity: then, and only then, the scale of a tile is not finite."""
    if q.scale.numel():
        top = q.scale.max().item()  # NaN if any is
        if top == 0xFF if q.scale.dtype == torch.uint8 else not math.isfinite(top):
            raise refusal(x)


def refusal(x: torch.Tensor) -> SnapshotError:
    """The error for a tensor that holds NaN or infinity."""
    count = sum(int((~part.isfinite()).sum()) for part in x.reshape(-1).split(reference.CHUNK))
    return SnapshotError(f"cannot quantize: {count} non-finite values in shape {tuple(x.shape)}")
