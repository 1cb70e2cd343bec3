"""Exactness: a slow oracle over each format's enumerated values, the reference, and the kernels agree bit for bit."""

import math

import numpy as np
import pytest
import torch

from rlq.errors import ConfigError, SnapshotError
from rlq.formats.elements import BLOCKS, ELEMENTS
from rlq.formats.schemes import TensorScheme
from rlq.quantize import QuantizedTensor, dispatch, fake_quantize, quantize, quantize_activations, reference
from rlq.quantize.cpu import launch as cpu
from rlq.quantize.encoded import Encoded

SCHEMES = ["fp8.tensor", "fp8.channel", "fp8.token", "fp8.group128", "fp8.block128x128", "fp8.block32x48"]
SCHEMES += ["fp8.group24", "fp8_e5m2.channel", "fp8_e5m2.tensor", "int8.channel", "int8.tensor", "int8.group64"]
SCHEMES += ["int4.group128", "int4.group32", "int4.channel", "nvfp4", "mxfp4", "mxfp8"]
SHAPES = [(64, 256), (130, 7), (1, 128), (100, 100), (5, 33), (192, 320), (576, 130), (3, 1)]
F32 = np.float32


def nearest_codes(quotient: np.ndarray, name: str) -> np.ndarray:
    """Code of the enumerated value nearest to each quotient, in float64; ties to the even code, saturating."""
    element = ELEMENTS[name]
    values = element.values.double().numpy()
    if element.kind == "int":
        candidates = np.flatnonzero(np.abs(values) <= element.max_finite)
        magnitude, sign = quotient.astype(np.float64), 0
    else:
        candidates = np.flatnonzero(np.isfinite(values) & ~np.signbit(values))
        magnitude, sign = np.abs(quotient).astype(np.float64), np.signbit(quotient).astype(np.int64) << element.bits - 1
    candidates = candidates[np.argsort(values[candidates])]
    table = values[candidates]
    above = np.searchsorted(table, np.clip(magnitude, table[0], table[-1])).clip(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    to_low, to_high = np.clip(magnitude, table[0], table[-1]) - low, high - np.clip(magnitude, table[0], table[-1])
    even_low = np.rint(low) % 2 == 0 if element.kind == "int" else candidates[above - 1] % 2 == 0
    pick_low = (to_low < to_high) | ((to_low == to_high) & even_low)
    return candidates[np.where(pick_low, above - 1, above)] | sign


def oracle(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of a float32 matrix under a scheme, one tile after another."""
    scheme = TensorScheme.parse(name)
    element, block = scheme.element, scheme.block_format
    codes, values = np.zeros(x.shape, np.int64), np.zeros(x.shape, F32)
    tile_rows, tile = scheme.tile(*x.shape)
    top = np.abs(x).max() if x.size else F32(0)
    global_scale = F32(1) / max(top, np.finfo(F32).tiny) * F32(448 * 6)
    global_scale = F32(1) if np.isinf(global_scale) else global_scale
    for i in range(0, x.shape[0], tile_rows):
        for j in range(0, x.shape[1], tile):
            part = x[i : i + tile_rows, j : j + tile]
            amax = np.abs(part).max()
            if block is None:
                scale = amax / F32(element.max_finite)
                scale = F32(2.0**-23) if scale == 0 else scale
            elif block.scale == "e8m0":
                mantissa, exponent = math.frexp(float(amax))  # amax = mantissa 2^exponent, mantissa in [0.5, 1)
                power = exponent - 1 + (2 * mantissa >= 1.75) - int(math.log2(element.max_finite))
                scale = F32(2.0 ** max(power, -127)) if amax > 0 else F32(2.0**-127)
            else:
                wanted = amax / F32(6) * global_scale
                stored = ELEMENTS["fp8"].values.numpy()[nearest_codes(np.array([wanted]), "fp8")[0]]
                scale = (F32(0.125) if stored == 0 else stored) / global_scale
            found = nearest_codes(part / scale, element.name)
            codes[i : i + tile_rows, j : j + tile] = found
            values[i : i + tile_rows, j : j + tile] = element.values.numpy()[found] * scale
    return codes, values


def hard(shape: tuple[int, int], seed: int = 0, spread: int = 30) -> torch.Tensor:
    """Values over 2 * spread binades with zero rows and blocks, subnormals, -0 and tiny negative numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-spread, spread, shape, generator=generator).float())
    x *= torch.exp2(torch.randint(-spread, spread, (shape[0], 1), generator=generator).float())
    for row, value in ((1, 0.0), (2, -0.0), (3, -1e-9), (4, 3e-44)):
        if row < shape[0]:
            x[row] = value
    if shape[0] > 8 and shape[1] >= 48:
        x[6, 16:48] = 0.0
        x[7, :16] = 1e-41
    return x


def unpacked(q: Encoded) -> np.ndarray:
    rows = q.codes.reshape(math.prod(q.shape[:-1]), -1)
    return reference.unpack(rows, q.scheme.element, q.shape[-1]).numpy().astype(np.int64)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    assert a is not None
    assert b is not None
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_oracle(name, shape):
    x = hard(shape)
    q = quantize(x, name)
    codes, values = oracle(x.numpy(), name)
    assert np.array_equal(unpacked(q), codes)
    assert np.array_equal(q.dequantize().numpy().view(np.int32), values.view(np.int32))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_are_the_reference(name, dtype):
    scheme = TensorScheme.parse(name)
    wide = hard((96, 320), spread=6 if dtype == torch.float16 else 30).to(dtype)
    for x in (wide, wide.t(), wide[:, 1::2], wide.view(3, 32, 320), wide[:1], wide[:, :1], wide[0]):
        expected = reference.encode(x, scheme, given(x, scheme))
        found = quantize(x, scheme)
        assert same_bits(found.codes, expected.codes)
        assert same_bits(found.scale, expected.scale)
        assert same_bits(found.dequantize(), reference.decode(expected, torch.float32))
        assert same_bits(found.dequantize(dtype), reference.decode(expected, dtype))


@pytest.mark.parametrize("name", SCHEMES)
def test_threads_change_nothing(name, monkeypatch):
    x = hard((257, 320)).to(torch.bfloat16)
    alone = quantize(x, name)
    monkeypatch.setattr(cpu, "PER_THREAD", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = quantize(x, name)
    assert same_bits(alone.codes, shared.codes)
    assert same_bits(alone.scale, shared.scale)
    assert same_bits(alone.dequantize(), shared.dequantize())


def given(x: torch.Tensor, scheme: TensorScheme) -> torch.Tensor | None:
    if not scheme.spans_tensor:
        return None
    return reference.tensor_scale(reference.largest_magnitude(x), scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_activations_are_the_reference_and_pass_nan_on(name):
    scheme = TensorScheme.parse(name)
    x = hard((48, 320), spread=20)
    for view in (x, x.t(), x.to(torch.bfloat16), x.view(2, 24, 320), x[:0]):
        expected = reference.encode_activations(view, scheme)
        assert same_bits(quantize_activations(view, scheme), expected)
        assert expected.isfinite().all()
    for bad in (math.nan, math.inf, -math.inf):
        broken = x.clone()
        broken[9, 70] = bad
        found = quantize_activations(broken, scheme)
        assert same_bits(found.isnan(), reference.encode_activations(broken, scheme).isnan())
        assert found[9, 70].isnan()
        assert not found.isinf().any()
        if scheme.tile(2, 1)[0] == 1:  # rows are independent
            keep = torch.arange(48) != 9
            assert torch.equal(found[keep], quantize_activations(x, scheme)[keep])


def test_static_scales_saturate_and_pass_nan_on():
    x = torch.tensor([[1.0, -900.0, 3.0, math.nan, math.inf, -0.0] + [0.5] * 26])
    scale = torch.tensor([1.0])
    found = quantize_activations(x, TensorScheme.parse("fp8.tensor"), scale)
    assert found[0, :3].tolist() == [1.0, -448.0, 3.0]
    assert found[0, 3:5].isnan().all()
    assert found[0, 5].signbit()
    nvfp4 = quantize_activations(x[:, :1].expand(1, 32), TensorScheme.parse("nvfp4"), torch.tensor([2688.0]))
    assert torch.equal(nvfp4, torch.ones(1, 32))


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8", "int4", "fp4"])
def test_a_million_values_and_all_ties(name):
    """With a scale of exactly 1 the code is the nearest enumerated value and nothing else."""
    element = ELEMENTS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1_000_000, generator=generator).sign() * torch.rand(1_000_000, generator=generator)
    x *= torch.exp2(torch.randint(-40, 20, x.shape, generator=generator).float())
    values = element.values[element.values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat([ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1), values])
    x = torch.cat([x, near, torch.tensor([0.0, -0.0])]).clamp(-element.max_finite, element.max_finite)
    if name == "fp4":  # blocks of 16 that start with 6 have an E8M0 scale of 1
        x = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
        x = torch.cat([torch.full((len(x), 1), 6.0), x], 1)
        found = unpacked(quantize(x, "mxfp4"))
    else:
        x = x[None]
        found = unpacked(quantize(x, f"{name}.tensor", amax=element.max_finite))
        assert np.array_equal(found, unpacked(reference.encode(x, TensorScheme.parse(f"{name}.tensor"), torch.ones(1))))
    assert np.array_equal(found, nearest_codes(x.numpy(), name))


@pytest.mark.parametrize("name", SCHEMES)
def test_symmetry_and_zero(name):
    x = hard((32, 320))
    assert torch.equal(quantize(-x, name).dequantize(), -quantize(x, name).dequantize())
    for shape in ((64, 320), (3, 5), (0, 16), (4, 0)):
        q = quantize(torch.zeros(shape), name)
        assert q.dequantize().shape == shape
        assert not q.dequantize().any()
        assert q.scale.float().isfinite().all()
        assert q.scale.dtype == torch.uint8 or (q.scale.float() > 0).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_fake_quantize_is_dequantize_and_the_wire_keeps_everything(name):
    for dtype in (torch.float32, torch.bfloat16):
        x = hard((130, 321)).to(dtype)
        q = quantize(x, name)
        assert same_bits(fake_quantize(x, name), q.dequantize(dtype))
        back = QuantizedTensor.from_wire(q.to_wire(), q.scheme, columns=321)
        assert same_bits(back.dequantize(), q.dequantize())
        assert back.nbytes == q.nbytes


def test_nvfp4_with_a_shared_or_tiny_amax():
    gate, up = torch.randn(32, 64) * 0.1, torch.randn(32, 64) * 0.3
    joint = torch.stack([gate.abs().max(), up.abs().max()]).max()
    q = quantize(gate, "nvfp4", amax=joint)
    both = quantize(torch.cat([gate, up]), "nvfp4")
    assert same_bits(q.codes, both.codes[:32])
    assert same_bits(q.global_scale, both.global_scale)
    tiny = quantize(torch.full((2, 32), 1e-38), "nvfp4")
    assert tiny.global_scale is not None
    assert tiny.global_scale.item() == 1.0  # 2688 / 1e-38 overflows
    assert not tiny.dequantize().any()


def test_fast_path_is_used():
    assert dispatch._cpu(torch.zeros(1)) is not None


def test_scales_are_those_of_the_field():
    """Spot values: amax / 448, E8M0 exponents and NVFP4's divisor."""
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 3] = 896.0, 7.0
    assert quantize(x, "fp8.channel").scale.tolist() == [[2.0], [7.0 / 448]]
    # floor(log2 896) - 2 = 7, and one more because 896 = 1.75 * 2^9
    assert quantize(x, "mxfp4").scale.tolist() == [[127 + 8], [127 + 1]]
    q = quantize(x, "nvfp4")
    assert q.global_scale is not None
    assert q.global_scale.tolist() == [float(F32(1) / F32(896) * F32(2688))]
    assert q.scale.float()[0].tolist() == [448.0, 0.125]
    assert set(BLOCKS) == {"nvfp4", "mxfp4", "mxfp8"}


@pytest.mark.parametrize(
    ("x", "scheme", "error", "match"),
    [
        (torch.tensor(1.0), "fp8.tensor", ConfigError, "0-d"),
        (torch.ones(4, 4, dtype=torch.int32), "fp8.channel", ConfigError, "int32"),
        (torch.ones(4, 4), "fp9.channel", ConfigError, "fp8, fp8_e5m2, int8, int4, nvfp4"),
        (torch.ones(4, 4), "fp8.column", ConfigError, "tensor, channel, token, group<N>"),
        (torch.ones(4, 4), "fp8", ConfigError, "granularity ''"),
        (torch.ones(4, 4), "fp8.group0", ConfigError, "group0"),
        (torch.ones(4, 4), "nvfp4.channel", ConfigError, "fixed"),
    ],
)
def test_bad_arguments_are_refused(x, scheme, error, match):
    with pytest.raises(error, match=match):
        quantize(x, scheme)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused_and_counted(name, bad):
    x = torch.randn(40, 48)
    x[3, 7] = x[39, 47] = bad
    with pytest.raises(SnapshotError, match="2 non-finite values"):
        quantize(x, name)
    if TensorScheme.parse(name).spans_tensor:
        with pytest.raises(SnapshotError, match="2 non-finite values"):
            quantize(x, name, amax=4.0)
        with pytest.raises(SnapshotError, match="amax"):
            quantize(torch.ones(4, 4), name, amax=bad)
    else:
        with pytest.raises(ConfigError, match="amax means nothing"):
            quantize(x, name, amax=4.0)
