"""Formats against the numbers of the OCP specifications and against torch's own dtypes."""

import dataclasses
import math

import pytest
import torch

from rlq.formats import schemes
from rlq.formats.elements import BLOCKS, ELEMENTS, FORMATS, Format
from rlq.formats.schemes import TensorScheme
from rlq.quantize import fake_quantize, quantize, quantize_activations

# OCP 8-bit Floating Point 1.0, table 1; OCP Microscaling Formats 1.0, tables 1 to 5.
# name: largest, smallest normal, smallest positive, ulp at 1, finite values, NaN codes, infinities
OCP = {
    "fp8": (448.0, 2**-6, 2**-9, 2**-3, 254, 2, 0),
    "fp8_e5m2": (57344.0, 2**-14, 2**-16, 2**-2, 248, 6, 2),
    "fp4": (6.0, 1.0, 0.5, 0.5, 16, 0, 0),
    "e8m0": (2.0**127, 2.0**-127, 2.0**-127, 1.0, 255, 1, 0),
    "int8": (127.0, 1.0, 1.0, 1.0, 256, 0, 0),
    "int4": (7.0, 1.0, 1.0, 1.0, 16, 0, 0),
}


def test_every_element_format_is_pinned():
    assert set(OCP) == set(ELEMENTS)


@pytest.mark.parametrize("name", OCP)
def test_specification(name):
    element = ELEMENTS[name]
    values = element.values.double()
    finite = values[values.isfinite()]
    positive = finite[finite > 0].sort().values
    above_one = positive[positive > 1]
    ulp_at_one = float(above_one[0]) - 1.0
    found = (
        float(positive[-1]),
        element.min_normal,
        float(positive[0]),
        ulp_at_one,
        finite.numel(),
        int(values.isnan().sum()),
        int(values.isinf().sum()),
    )
    assert found == OCP[name]
    assert (element.max_finite, element.min_positive, element.ulp_at_one) == (found[0], found[2], found[3])
    assert values.numel() == 2**element.bits


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "e8m0"])
def test_all_bytes_mean_what_torch_says(name):
    dtype = {"e8m0": torch.float8_e8m0fnu}.get(name, ELEMENTS[name].dtype)
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    values = ELEMENTS[name].values.double()
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(0.0, math.inf, -math.inf), expected.nan_to_num(0.0, math.inf, -math.inf))
    assert torch.equal(values.signbit() & ~values.isnan(), expected.signbit() & ~expected.isnan())


def test_four_bit_codes():
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert ELEMENTS["fp4"].values.tolist() == magnitudes + [-m for m in magnitudes]
    assert ELEMENTS["int4"].values.tolist() == list(range(-8, 8))


def test_floats_grow_with_their_code():
    for element in ELEMENTS.values():
        if element.kind == "float":
            positive = element.values[: 1 << element.bits - element.signed]
            positive = positive[positive.isfinite()]
            assert (positive.diff() > 0).all(), element.name


def test_block_formats_name_known_elements():
    for block in BLOCKS.values():
        assert {block.element, block.scale} <= set(ELEMENTS)


E3M4 = Format(
    "fp8_e3m4", "E3M4", "float", 8, 30.0, torch.uint8, exponent_bits=3, mantissa_bits=4, bias=3, nan_codes=(0x7F, 0xFF)
)  # fmt: skip
INT6 = Format("int6", "INT6 in a byte", "int", 8, 31.0, torch.int8)
TWIN = dataclasses.replace(ELEMENTS["fp8"], name="fp8x")


@pytest.mark.parametrize("new", [E3M4, INT6, TWIN], ids=lambda element: element.name)
def test_a_new_element_format_is_one_row_of_the_table(monkeypatch, new):
    """No kernel knows it and torch may have no dtype for it; the reference goes by what the format says of itself."""
    monkeypatch.setitem(ELEMENTS, new.name, new)
    monkeypatch.setattr(schemes, "FORMATS", (*FORMATS, new.name))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q = quantize(x, f"{new.name}.channel")
    values = q.dequantize()
    assert torch.equal(values, fake_quantize(x, f"{new.name}.channel"))
    assert torch.equal(values, quantize_activations(x, TensorScheme.parse(f"{new.name}.token")))
    # No code of the format is nearer to an element than the one that was chosen.
    reach = new.values[new.values.abs() <= new.max_finite]
    nearest = (x[..., None] - reach * q.scale[..., None]).abs().amin(-1)
    assert torch.allclose((x - values).abs(), nearest, rtol=1e-4, atol=1e-7)
    if new is TWIN:
        assert torch.equal(values, fake_quantize(x, "fp8.channel"))
