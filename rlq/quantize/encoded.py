"""What the quantizers return: codes and scales as plain data."""

from dataclasses import dataclass

import torch

from ..formats.schemes import TensorScheme


@dataclass(frozen=True)
class Encoded:
    """Codes and scales of one tensor of shape (..., K)."""

    codes: torch.Tensor
    """Element codes in the format's storage dtype: (..., K), or (..., ceil(K / pack)) for 4-bit formats."""
    scale: torch.Tensor
    """Stored scales: fp32, or the block format's (E4M3, or E8M0 as uint8), of shape `TensorScheme.scale_shape`."""
    scheme: TensorScheme
    """Stored with the codes, never guessed from shapes."""
    shape: torch.Size
    """Shape of the tensor that was quantized."""
    global_scale: torch.Tensor | None = None
    """NVFP4's second scale as compressed-tensors stores it, a divisor: fp32 (1,), or (..., 1) where it is per token."""
