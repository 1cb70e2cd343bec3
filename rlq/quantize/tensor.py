"""The result of quantizing one tensor, and its layout on the wire and on disk (compressed-tensors names)."""

from dataclasses import dataclass

import torch

from ..schemes import TensorScheme


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of one tensor."""

    codes: torch.Tensor
    """Element codes in the format's storage dtype, of the original shape."""
    scale: torch.Tensor
    """fp32 scales that broadcast against `codes`: `(N, 1)` for channel and token granularity."""
    scheme: TensorScheme
    """Stored with the codes, never guessed from shapes."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that was quantized."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return codes * scale, multiplied in fp32 and rounded once to `dtype`."""
        return (self.codes.to(torch.float32) * self.scale).to(dtype)

    def to_wire(self) -> dict[str, torch.Tensor]:
        """Tensors by compressed-tensors suffix (`weight`, `weight_scale`)."""
        return {"weight": self.codes, "weight_scale": self.scale}

    @classmethod
    def from_wire(cls, tensors: dict[str, torch.Tensor], scheme: TensorScheme) -> "QuantizedTensor":
        """Inverse of `to_wire`; shares storage with `tensors`."""
        return cls(tensors["weight"], tensors["weight_scale"], scheme)
