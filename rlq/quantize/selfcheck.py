"""Comparison of a fast path with the reference, bit for bit, on tensors that are hard to round."""

from types import ModuleType

import torch

from ..formats.schemes import TensorScheme
from . import reference


def hurtful(shape: tuple[int, int], dtype: torch.dtype, scheme: TensorScheme) -> torch.Tensor:
    """Zeros of both signs, subnormals, values over all binades, and rows of ties whose scale is a power of two.

    The rows cycle through ten kinds, so that tiles of several rows mix them; the rest of the tensor is random, seeded.
    """
    generator = torch.Generator().manual_seed(0)

    def exponents(*size: int, low: int = -126, high: int = 127) -> torch.Tensor:
        return torch.exp2(torch.randint(low, high, size, generator=generator).float())

    x = torch.randn(shape, generator=generator)
    x[2::10] *= exponents(*x[2::10].shape)
    x[3::10] = 0.0
    x[4::10] = -0.0
    x[5::10] *= exponents(len(x[5::10]), 1)
    x[6::10] *= 1e-41
    x[7::10] *= 3e38
    x[:16, 16:48] = 0.0
    # With the largest value in a tile its fp32 scale is 1; an MX scale is 1 with the largest power of two.
    element = scheme.element
    values = element.values[element.values.isfinite() & (element.values.abs() <= element.max_finite)].sort().values
    ties = torch.cat([(values[1:] + values[:-1]) / 2, values])
    for kind, top in ((8, element.max_finite), (9, 2.0 ** int(torch.tensor(element.max_finite).log2()))):
        rows = x[kind::10]
        rows[:] = ties[torch.randint(len(ties), rows.shape, generator=generator)].clamp(-top, top)
        rows[:, ::16] = top
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest / 2).to(dtype)  # the largest magnitude is that of a negative number


def first_difference(
    fast: ModuleType, scheme: TensorScheme, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]
) -> str | None:
    """What `fast` (`cpu.py`, `cuda.py`) computes in other bits than `reference.py` on the same device, or None."""
    x = hurtful(shape, dtype, scheme).to(device)
    unit, broken = torch.ones(1, device=device), x.clone()
    broken[1, 1], broken[12, 5], broken[33, 2] = float("nan"), float("inf"), -float("inf")
    spans = scheme.spans_tensor
    for rows in (x, x.flip(0)[:, 1:], x.t().contiguous().t()):
        amax = reference.largest_magnitude(rows)
        if not same(fast.largest_magnitude(rows), amax):
            return "the largest magnitude differs"
        # A given scale of 1 leaves ties as they are.
        for given in (reference.tensor_scale(amax, scheme), unit) if spans else (None,):
            expected, found = reference.encode(rows, scheme, given), fast.encode(rows, scheme, given)
            if not same(found.codes, expected.codes):
                return "codes differ"
            if not same(found.scale, expected.scale):
                return "scales differ"
            if not same(fast.decode(expected, dtype), reference.decode(expected, dtype)):
                return "dequantized values differ"
    if fast.largest_magnitude(broken).isfinite().any():
        return "NaN or infinity is not seen"
    for given in (None, unit) if spans else (None,):
        for rows in (x, broken):
            expected = reference.encode_activations(rows, scheme, given)
            found = fast.fake_quantize_rows(rows, scheme, given)
            # What bits a NaN has does not matter.
            if not same(found.nan_to_num(), expected.nan_to_num()) or not same(found.isnan(), expected.isnan()):
                return "rounded activations differ"
    return None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bytes."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )
