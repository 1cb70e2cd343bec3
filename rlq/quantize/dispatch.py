"""The fastest implementation for the device of a tensor. All of them are bit-identical."""

import functools
import importlib.util

import torch

from ..formats.schemes import TensorScheme
from . import reference
from .encoded import Encoded


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


def encode(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> Encoded:
    """See `rlq.quantize.reference.encode`."""
    fast = _encoder(x, scheme)
    return reference.encode(x, scheme, given) if fast is None else fast.encode(x, scheme, given)


def decode(q: Encoded, dtype: torch.dtype) -> torch.Tensor:
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
