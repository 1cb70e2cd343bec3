"""Updating codes and scales in place equals quantizing anew, bit for bit, whatever changed."""

import pytest
import torch

from rlq.errors import ConfigError, SnapshotError
from rlq.quantize import cpu, dispatch, quantize, reference, requantize_
from rlq.quantize.incremental import _overwrite
from rlq.schemes import TensorScheme

SCHEMES = ["fp8.channel", "fp8.tensor", "fp8.block128x128", "fp8.block32x48", "fp8.group128", "fp8_e5m2.channel"]
SCHEMES += ["int8.channel", "int8.tensor", "int4.group128", "int4.group32", "nvfp4", "mxfp4", "mxfp8"]


def same(a, b) -> bool:
    tensors = [(a.codes, b.codes), (a.scale, b.scale)]
    tensors += [(a.global_scale, b.global_scale)] if b.global_scale is not None else []
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in tensors)


def changes(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Next versions of a tensor, by what happened to it."""
    generator = torch.Generator().manual_seed(1)
    top = x.float().abs().flatten().argmax()

    def at_top(value: float) -> torch.Tensor:
        out = x.clone()
        out.view(-1)[top] = value
        return out

    some = x + torch.where(torch.rand(x.shape, generator=generator) < 0.01, 0.01, 0.0).to(x.dtype)
    zero_row, rows_to_zero = x.clone(), x.clone()
    zero_row[5] = 0.001
    rows_to_zero[6:10] = 0.0
    signs = x.clone()
    signs[5] = -0.0
    return {
        "nothing": x.clone(),
        "one percent": some,
        "everything": x * 1.7,
        "the largest shrinks": at_top(0.0),
        "the largest shrinks a little": at_top(float(x.view(-1)[top]) * 0.998),
        "the largest grows": at_top(100.0),
        "a row of zeros wakes": zero_row,
        "rows become zero": rows_to_zero,
        "a sign of zero": signs,
        "all zero": torch.zeros_like(x),
    }


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(130, 384), (64, 256)])
def test_update_is_quantize(name, dtype, shape, monkeypatch):
    old = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    old[5] = 0.0
    scheme = TensorScheme.parse(name)
    assert cpu.can_update(scheme, old, old) == reference.spans_tensor(scheme)
    for what, new in changes(old).items():
        expected = quantize(new, name)
        q = quantize(old, name)
        assert requantize_(q, old, new) is q
        assert same(q, expected), what
        assert same(requantize_(q, new, old), quantize(old, name)), what


@pytest.mark.parametrize("name", SCHEMES)
def test_a_small_change_is_made_in_place(name, monkeypatch):
    old = torch.randn(128, 384).to(torch.bfloat16)
    old[0, 0] = 50.0  # whatever is largest stays
    new = old.clone()
    new[7, 100] += 0.5
    q, expected = quantize(old, name), quantize(new, name)
    monkeypatch.setattr(dispatch, "quantize", lambda *args, **kwargs: pytest.fail("encoded anew"))
    assert same(requantize_(q, old, new), expected)


@pytest.mark.parametrize("name", ["nvfp4", "fp8.tensor"])
def test_shared_amax(name):
    old = torch.randn(64, 256).to(torch.bfloat16)
    new = old + 0.01
    for amax in (9.0, 30.0):
        q = quantize(old, name, amax=9.0)
        assert same(requantize_(q, old, new, amax=amax), quantize(new, name, amax=amax))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("layout", ["odd columns", "transposed", "fp16"])
def test_other_layouts_fall_back(name, layout):
    shape = (64, 250) if layout == "odd columns" else (64, 256)
    old = torch.randn(shape).to(torch.float16 if layout == "fp16" else torch.bfloat16)
    new = old + 0.1
    if layout == "transposed":
        old, new = old.t(), new.t()
    assert same(requantize_(quantize(old, name), old, new), quantize(new, name))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_refused(name, bad):
    old = torch.randn(64, 256).to(torch.bfloat16)
    new = old.clone()
    new[9, 9] = bad
    with pytest.raises(SnapshotError, match="1 non-finite"):
        requantize_(quantize(old, name), old, new)


def test_shapes_have_to_agree():
    q = quantize(torch.ones(4, 16), "fp8.channel")
    with pytest.raises(ConfigError, match="amax means nothing"):
        requantize_(q, torch.ones(4, 16), torch.ones(4, 16), amax=1.0)
    with pytest.raises(ConfigError, match="anew"):
        requantize_(q, torch.ones(4, 16), torch.ones(4, 32))
    assert _overwrite(q, quantize(torch.zeros(4, 16), "fp8.channel")) is q
