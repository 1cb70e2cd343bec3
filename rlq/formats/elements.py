"""Number formats as data: what each code means, how codes are stored, and which scale a block format carries.

The float formats follow the OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2) and the OCP Microscaling Formats
Specification 1.0 (E2M1, E8M0). A code with sign S, exponent field E and mantissa field M of `mantissa_bits` bits means

    (-1)^S 2^(E - bias) (1 + M / 2^mantissa_bits)        E > 0   normal
    (-1)^S 2^(1 - bias) M / 2^mantissa_bits              E = 0   subnormal and zero

Integers are symmetric: the most negative code exists in storage but is never produced, so that -x gets code -q.
"""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One element format: what a code can hold and how it is stored."""

    name: str
    """rlq's name, the first part of a tensor scheme such as `fp8.channel`."""
    standard: str
    """Name in the literature."""
    kind: str
    """`float` or `int`, as compressed-tensors' `QuantizationArgs.type` names it."""
    bits: int
    """Bits per element."""
    max_finite: float
    """Largest magnitude that a quantizer produces; amax / max_finite is the scale."""
    dtype: torch.dtype
    """Storage dtype of the codes; a 4-bit format packs several codes into one element of it, lowest bits first."""
    exponent_bits: int = 0
    """Width of E; 0 for integers."""
    mantissa_bits: int = 0
    """Width of M; 0 for integers."""
    bias: int = 0
    """Exponent bias of a float, code of zero of an integer in storage (8 for offset-binary INT4)."""
    signed: bool = True
    """False for E8M0, which holds powers of two only."""
    nan_codes: tuple[int, ...] = ()
    """Codes that mean NaN."""
    inf_codes: tuple[int, ...] = ()
    """Codes that mean plus or minus infinity; quantizers saturate and never produce them."""

    @property
    def pack(self) -> int:
        """Codes per stored element."""
        return torch.iinfo(self.dtype).bits // self.bits if self.bits < 8 else 1

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        if self.kind == "int":
            return 1.0
        return 2.0 ** (1 - self.bias) if self.signed else 2.0**-self.bias

    @property
    def min_positive(self) -> float:
        """Smallest positive value, subnormal where the format has subnormals."""
        return self.min_normal * 2.0**-self.mantissa_bits

    @property
    def ulp_at_one(self) -> float:
        """Distance from 1 to the next larger value."""
        return 1.0 if self.kind == "int" or not self.signed else 2.0**-self.mantissa_bits

    def value(self, code: int) -> float:
        """The real number that a code means; NaN and infinities included."""
        if code in self.nan_codes:
            return float("nan")
        if self.kind == "int":
            return float(code - self.bias) if self.bias else float(code - (code >> 7 << 8))
        if not self.signed:
            return 2.0 ** (code - self.bias)
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        if code in self.inf_codes:
            return sign * float("inf")
        exponent = code >> self.mantissa_bits & (1 << self.exponent_bits) - 1
        fraction = (code & (1 << self.mantissa_bits) - 1) / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * 2.0 ** (1 - self.bias) * fraction
        return sign * 2.0 ** (exponent - self.bias) * (1 + fraction)

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """Value of every code, float32 (2^bits,): exact, since no format here is wider than float32."""
        return torch.tensor([self.value(code) for code in range(1 << self.bits)], dtype=torch.float64).float()


@dataclass(frozen=True)
class BlockFormat:
    """A format whose blocks of consecutive elements share a low-precision scale."""

    name: str
    """rlq's name; a tensor scheme of its own, without a granularity."""
    element: str
    """Key of `ELEMENTS`."""
    scale: str
    """Key of `ELEMENTS`: how the block scale is stored."""
    block: int
    """Elements per block, along the last dimension."""
    tensor_scale: bool = False
    """True if the tensor has a second, fp32 scale, because the block scale alone lacks range."""


ELEMENTS: dict[str, Format] = {
    element.name: element
    for element in (
        Format(
            "fp8",
            "E4M3FN",
            "float",
            8,
            448.0,
            torch.float8_e4m3fn,
            exponent_bits=4,
            mantissa_bits=3,
            bias=7,
            nan_codes=(0x7F, 0xFF),
        ),
        Format(
            "fp8_e5m2",
            "E5M2",
            "float",
            8,
            57344.0,
            torch.float8_e5m2,
            exponent_bits=5,
            mantissa_bits=2,
            bias=15,
            nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
            inf_codes=(0x7C, 0xFC),
        ),
        Format("fp4", "E2M1", "float", 4, 6.0, torch.uint8, exponent_bits=2, mantissa_bits=1, bias=1),
        Format(
            "e8m0",
            "E8M0",
            "float",
            8,
            2.0**127,
            torch.uint8,
            exponent_bits=8,
            bias=127,
            signed=False,
            nan_codes=(0xFF,),
        ),
        Format("int8", "INT8", "int", 8, 127.0, torch.int8),
        Format("int4", "INT4", "int", 4, 7.0, torch.int32, bias=8),
    )
}

BLOCKS: dict[str, BlockFormat] = {
    block.name: block
    for block in (
        BlockFormat("nvfp4", element="fp4", scale="fp8", block=16, tensor_scale=True),
        BlockFormat("mxfp4", element="fp4", scale="e8m0", block=32),
        BlockFormat("mxfp8", element="fp8", scale="e8m0", block=32),
    )
}

# What a tensor scheme may start with, in the order in which messages list it.
FORMATS = ("fp8", "fp8_e5m2", "int8", "int4", *BLOCKS)
