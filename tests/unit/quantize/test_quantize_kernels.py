"""What the vector kernels rest on: division without a division, and its limits."""

# numba gives intrinsics their arguments.
# pyright: reportCallIssue=false
import llvmlite.ir as ir
import numba
import numpy as np
import pytest
import torch
from numba import types
from numba.extending import intrinsic

from rlq.formats.schemes import TensorScheme
from rlq.quantize import quantize, reference
from rlq.quantize.cpu import launch as cpu
from rlq.quantize.cpu.cache import FOLDERS, source_digest
from rlq.quantize.cpu.codes import _quotient
from rlq.quantize.cpu.simd import splat

SCHEMES = ["fp8.tensor", "fp8.channel", "fp8.block32x48", "fp8_e5m2.channel", "fp8_e5m2.tensor", "int8.channel"]
SCHEMES += ["int8.tensor", "int4.group32", "int4.channel", "nvfp4", "mxfp4", "mxfp8"]
F32 = np.float32


def divider(corrections: int):
    @intrinsic
    def divide(typingctx, x, scale, inverse):
        def generate(context, builder, signature, args):
            found = _quotient(*(splat(builder, value, 1) for value in args), corrections)
            return builder.extract_element(found.value, ir.Constant(ir.IntType(32), 0))

        return types.float32(types.float32, types.float32, types.float32), generate

    @numba.njit(error_model="numpy")
    def wrong(xs, scales):
        """How often the quotient is not the rounded one."""
        count = 0
        for scale in scales:
            inverse = F32(1) / scale
            for x in xs:
                count += divide(x, scale, inverse) != x / scale
        return count

    return wrong


def test_every_bfloat16_over_every_scale():
    """All mantissas; exponents change nothing far from underflow. Both orders of size occur."""
    xs = (np.arange(128, dtype=np.int32) << 16 | 127 << 23).view(F32)
    scales = (np.arange(1 << 23, dtype=np.int32) | 127 << 23).view(F32)
    assert divider(1)(xs, scales) == 0


def test_float32_needs_two_corrections():
    generator = np.random.default_rng(0)
    xs, scales = (generator.uniform(1, 2, 10_000).astype(F32) for _ in range(2))
    assert divider(0)(xs[:1000], scales[:1000]) > 0
    assert divider(2)(xs, scales) == 0


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_beyond_the_safe_ones(name, dtype):
    scheme = TensorScheme.parse(name)
    for exponent in (-126, -110, -62, -56, 55, 66, 125):
        x = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)).clamp(-3.9, 3.9).to(dtype)
        x = (x.double() * 2.0**exponent).to(dtype)
        x[1] *= 2.0**-20
        given = None
        if scheme.spans_tensor:
            given = reference.tensor_scale(reference.largest_magnitude(x), scheme)
        assert_same(quantize(x, scheme), reference.encode(x, scheme, given))


@pytest.mark.parametrize("name", [name for name in SCHEMES if TensorScheme.parse(name).spans_tensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quotients_that_overflow_saturate(name, dtype):
    scheme = TensorScheme.parse(name)
    x = (torch.randn(8, 96, generator=torch.Generator().manual_seed(0)).clamp(-3.9, 3.9) * 2.0**125).to(dtype)
    x[:, ::3] *= 2.0**-124
    for amax in (1e-12, 1e-20, 1e3):
        given = reference.tensor_scale(torch.tensor([amax]), scheme)
        assert_same(quantize(x, scheme, amax=amax), reference.encode(x, scheme, given))


def assert_same(found, expected):
    assert cpu.can_encode(found.scheme, found.shape)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scale.view(torch.uint8), expected.scale.view(torch.uint8))


def test_kernels_are_cached_by_all_files_of_their_folders(tmp_path):
    """numba notices a change of a function itself, and not one of what it calls in another file."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "one.py").write_text("a = 1\n")
    first = source_digest((folder,))
    assert source_digest((folder,)) == first
    (folder / "helper.py").write_text("b = 1\n")
    second = source_digest((folder,))
    (folder / "helper.py").write_text("b = 2\n")
    assert len({first, second, source_digest((folder,))}) == 3
    names = {path.name for folder in FOLDERS for path in folder.rglob("*.py")}
    assert {"kernels.py", "codes.py", "simd.py", "reference.py", "rules.py", "elements.py"} <= names
