"""The activation path: bit-equal to the reference, and non-finite values stay visible."""

import pytest
import torch

from rlq.formats.schemes import TensorScheme
from rlq.quantize import fake_quantize, quantize_activations
from rlq.quantize.reference import decode, encode

FP8 = TensorScheme.parse("fp8.token")


def hard_values(rows: int, columns: int) -> torch.Tensor:
    """Magnitudes over 120 binades, and rows that are zero, subnormal, negative zero or made of E4M3 ties."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-60, 60, x.shape, generator=generator).float())
    x[0] = 0.0
    x[1] = -0.0
    x[2] *= 1e-43 / x[2].abs().max()
    x[3] = -1e-9
    # With 448 in the row the scale is exactly 1, so these quotients lie halfway between two codes.
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    x[4, :126], x[5, :126] = ties, -ties
    x[4:6, 126:] = 448.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fast_path_is_the_reference_bit_for_bit(dtype):
    x = hard_values(64, 576).clamp(-6e4, 6e4).to(dtype)
    for view in (x, x.view(4, 16, 576), x.t().contiguous().t(), x[:, ::2], x[:0]):
        out = quantize_activations(view, FP8)
        assert out.dtype == dtype
        assert torch.equal(out, fake_quantize(view, FP8))
        assert torch.equal(out.signbit(), fake_quantize(view, FP8).signbit())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows_become_nan_and_leave_the_others_alone(bad):
    x = torch.randn(4, 32)
    clean = quantize_activations(x, FP8)
    x[2, 7] = bad
    out = quantize_activations(x, FP8)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])
    assert torch.equal(out.isnan(), decode(encode(x, FP8), x.dtype).isnan())
