"""The result of quantizing one tensor, and its layout on the wire and on disk (compressed-tensors names)."""

import math
from dataclasses import dataclass

import torch

from ..errors import SnapshotError
from ..formats.schemes import TensorScheme

# Suffixes of a quantized weight's tensors, in wire order; a weight has those that its scheme needs.
WIRE = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape")


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of one tensor of shape (..., K)."""

    codes: torch.Tensor
    """Element codes in the format's storage dtype: (..., K), or (..., ceil(K / pack)) for 4-bit formats."""
    scale: torch.Tensor
    """Stored scales: fp32, or the block format's (E4M3, or E8M0 as uint8). Shape (1,) for `tensor`, (..., 1) for
    `channel` and `token`, (..., ceil(K / N)) for groups and block formats, (ceil(R / M), ceil(K / N)) for blocks."""
    scheme: TensorScheme
    """Stored with the codes, never guessed from shapes."""
    shape: torch.Size
    """Shape of the tensor that was quantized."""
    global_scale: torch.Tensor | None = None
    """NVFP4's second scale as compressed-tensors stores it, a divisor: fp32 (1,), or (..., 1) where it is per token."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scale, self.global_scale) if tensor is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return codes * scale, multiplied in fp32 and rounded once to `dtype`."""
        from .dispatch import decode  # the kernels need this class

        return decode(self, dtype)

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
        scale = tensors["weight_scale"].reshape(scale_shape(shape, scheme))
        if scheme.block_format is None:
            scale = scale.to(torch.float32)  # some FP8 checkpoints of others ship bf16 scales
        return cls(codes, scale, scheme, shape, tensors["weight_global_scale"].reshape(1) if two_scales else None)


def scale_shape(shape: torch.Size, scheme: TensorScheme) -> tuple[int, ...]:
    """Shape of the stored scales of a tensor of `shape`."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    tile_rows, tile_columns = scheme.tile(rows, columns)
    if scheme.granularity == "tensor":
        return (1,)
    if scheme.granularity.startswith("block"):
        return (-(-rows // tile_rows), -(-columns // tile_columns))
    return (*shape[:-1], -(-columns // tile_columns) if columns else 1)
