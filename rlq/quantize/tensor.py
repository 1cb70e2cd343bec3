"""Quantize one tensor: checks, codes and scales, and their names on the wire and on disk (compressed-tensors')."""

import functools
import math
from dataclasses import dataclass

import torch

from ..errors import ConfigError, SnapshotError
from ..formats.schemes import TensorScheme
from . import dispatch, reference
from .encoded import Encoded


@dataclass(frozen=True)
class QuantizedTensor(Encoded):
    """A quantized tensor: its codes and scales, the way back, and its layout on the wire."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scale, self.global_scale) if tensor is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return codes * scale, multiplied in fp32 and rounded once to `dtype`."""
        return dispatch.decode(self, dtype)

    def to_wire(self) -> dict[str, torch.Tensor]:
        """Tensors by compressed-tensors suffix, such as `weight` and `weight_scale`."""
        packed = self.scheme.element.pack > 1
        wire = {"weight_packed" if packed else "weight": self.codes, "weight_scale": self.scale}
        if self.global_scale is not None:
            wire["weight_global_scale"] = self.global_scale
        if self.scheme.element.kind == "int" and packed:
            wire["weight_shape"] = torch.tensor(self.shape, dtype=torch.int64)
        return wire

    @classmethod
    def from_wire(
        cls, tensors: dict[str, torch.Tensor], scheme: TensorScheme, columns: int | None = None
    ) -> "QuantizedTensor":
        """Inverse of `to_wire`; shares storage with `tensors`.

        Args:
            tensors: by suffix; others than those of the scheme are ignored.
            scheme: how they were quantized.
            columns: K, where packing leaves it open; default: all packed codes are elements.

        Raises:
            SnapshotError: a tensor of the scheme is missing.
        """
        element = scheme.element
        name = "weight_packed" if element.pack > 1 else "weight"
        two_scales = scheme.block_format is not None and scheme.block_format.tensor_scale
        for suffix in (name, "weight_scale", *(["weight_global_scale"] if two_scales else [])):
            if suffix not in tensors:
                raise SnapshotError(f"a {scheme} weight needs {suffix!r}; got {sorted(tensors)}")
        codes = tensors[name]
        shape = torch.Size((*codes.shape[:-1], columns or codes.shape[-1] * element.pack))
        scale = tensors["weight_scale"].reshape(scheme.scale_shape(shape))
        if scheme.block_format is None:
            scale = scale.to(torch.float32)  # some FP8 checkpoints of others ship bf16 scales
        return cls(codes, scale, scheme, shape, tensors["weight_global_scale"].reshape(1) if two_scales else None)


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
    if amax is not None and not scheme.spans_tensor:
        raise ConfigError(f"{scheme} has no scale that spans a tensor, so amax means nothing; leave it out")
    given = None
    if scheme.spans_tensor:
        own = dispatch.largest_magnitude(x)
        if not math.isfinite(own.item()):
            raise refusal(x)
        wanted = own if amax is None else torch.as_tensor(amax, dtype=torch.float32, device=x.device).reshape(1)
        if not math.isfinite(wanted.item()):
            raise SnapshotError(f"amax is {wanted.item()}; it has to be finite")
        given = reference.tensor_scale(wanted, scheme)
    encoded = dispatch.encode(x, scheme, given)
    if given is None:
        check_scales(encoded, x)
    return QuantizedTensor(encoded.codes, encoded.scale, scheme, x.shape, encoded.global_scale)


_parse = functools.lru_cache(TensorScheme.parse)


def fake_quantize(
    x: torch.Tensor, scheme: TensorScheme | str, *, amax: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Round `x` to the values that `scheme` can hold; bit-equal to `quantize(x, scheme).dequantize(x.dtype)`."""
    return quantize(x, scheme, amax=amax).dequantize(x.dtype)


def check_scales(q: Encoded, x: torch.Tensor) -> None:
    """Refuse what `x` became if it holds NaN or infinity: then, and only then, the scale of a tile is not finite."""
    if q.scale.numel():
        top = q.scale.max().item()  # NaN if any is
        if top == 0xFF if q.scale.dtype == torch.uint8 else not math.isfinite(top):
            raise refusal(x)


def refusal(x: torch.Tensor) -> SnapshotError:
    """The error for a tensor that holds NaN or infinity."""
    count = sum(int((~part.isfinite()).sum()) for part in x.reshape(-1).split(reference.CHUNK))
    return SnapshotError(f"cannot quantize: {count} non-finite values in shape {tuple(x.shape)}")
