"""Number formats as data."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One element format: what a code can hold and how it is stored."""

    name: str
    """rlq's name, the first part of a tensor scheme such as `fp8.channel`."""
    dtype: torch.dtype
    """Storage dtype of the codes."""
    bits: int
    """Bits per element."""
    max_finite: float
    """Largest finite magnitude; amax / max_finite is the scale."""
    kind: str
    """`float` or `int`, as compressed-tensors' `QuantizationArgs.type` names it."""


FORMATS: dict[str, Format] = {
    # OCP 8-bit floating point, E4M3 (no infinity, NaN at S.1111.111).
    "fp8": Format("fp8", torch.float8_e4m3fn, bits=8, max_finite=448.0, kind="float"),
}
