"""What guards the GPU path, without a GPU: the self-check, the fallback, the sizes of programs, and `make gpu-check`.

Triton is not part of a CPU installation. Where it is importable, `tests/gpu/check.py --device cpu` also runs the
kernels in its interpreter, and says "not installed" where it is not.
"""

import importlib
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from rlq.formats.schemes import TensorScheme
from rlq.quantize import QuantizedTensor, reference, selfcheck
from rlq.quantize.cpu import launch as cpu
from rlq.quantize.encoded import Encoded

CHECK = Path(__file__).parents[2] / "gpu/check.py"
SCHEMES = ["fp8.channel", "fp8.tensor", "fp8.block32x64", "int8.token", "int4.group32", "nvfp4", "mxfp4", "mxfp8"]
CPU = torch.device("cpu")


def fast(**replaced) -> types.ModuleType:
    """The numba path as `cuda.py` would offer it, with some functions replaced."""
    names = ("encode", "decode", "fake_quantize_rows", "largest_magnitude")
    module = types.ModuleType("fast")
    vars(module).update({name: getattr(cpu, name) for name in names} | replaced)
    return module


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_exact_path_passes(name, dtype):
    scheme = TensorScheme.parse(name)
    path = fast(fake_quantize_rows=reference.encode_activations) if "block" in name else fast()
    assert selfcheck.first_difference(path, scheme, dtype, CPU, (44, 71)) is None


def approximate_division(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> Encoded:
    """FP8 per channel as a GPU computes it when the divisor is a Python number: times its reciprocal."""
    scale = x.float().abs().amax(1, keepdim=True) * torch.tensor(1 / 448)
    scale = torch.where(scale == 0, reference.ZERO_TILE_SCALE, scale)
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantizedTensor(codes, scale, scheme, x.shape)


def ties_away_from_zero(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> Encoded:
    """INT8 per tensor with the rounding of C's `round`."""
    assert given is not None
    quotient = (x.float() / given).clamp(-127, 127)
    codes = (quotient.sign() * (quotient.abs() + 0.5).floor()).to(torch.int8)
    return QuantizedTensor(codes, given, scheme, x.shape)


def flushed(x: torch.Tensor, scheme: TensorScheme, given: torch.Tensor | None) -> Encoded:
    """Subnormal numbers taken for zero."""
    rows = x.float()
    return cpu.encode(torch.where(rows.abs() < reference.TINY, 0.0, rows), scheme, given)


@pytest.mark.parametrize(
    ("name", "wrong", "finding"),
    [
        ("fp8.channel", {"encode": approximate_division}, "scales differ"),
        ("int8.tensor", {"encode": ties_away_from_zero}, "codes differ"),
        ("fp8.channel", {"encode": flushed}, "differ"),
        ("mxfp8", {"encode": flushed}, "differ"),
        ("nvfp4", {"decode": lambda q, dtype: cpu.decode(q, dtype).nextafter(torch.ones(()))}, "dequantized values"),
        ("fp8.token", {"fake_quantize_rows": lambda x, s, g: cpu.fake_quantize_rows(x, s, g) + 0.0}, "activations"),
        ("fp8.tensor", {"largest_magnitude": lambda x: cpu.largest_magnitude(x).nan_to_num()}, "not seen"),
        ("fp8.tensor", {"largest_magnitude": lambda x: x.max().float().reshape(1)}, "largest magnitude"),
    ],
)
def test_a_path_that_is_nearly_right_is_found_out(name, wrong, finding):
    found = selfcheck.first_difference(fast(**wrong), TensorScheme.parse(name), torch.float32, CPU, (44, 71))
    assert found is not None
    assert finding in found


@pytest.fixture
def cuda(monkeypatch):
    """`rlq.quantize.gpu.launch` on a machine where Triton can be imported and can compile nothing."""

    class Kernel:
        def __init__(self, function):
            pass

        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler")

    language = types.ModuleType("triton.language")
    language.constexpr = lambda value: types.SimpleNamespace(value=value)  # type: ignore[attr-defined]
    triton = types.ModuleType("triton")
    triton.jit, triton.language = Kernel, language  # type: ignore[attr-defined]
    triton.errors = types.SimpleNamespace(TritonError=type("TritonError", (Exception,), {}))  # type: ignore[attr-defined]
    for name in ("launch", "kernels"):
        monkeypatch.delitem(sys.modules, f"rlq.quantize.gpu.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    yield importlib.import_module("rlq.quantize.gpu.launch")
    for name in ("launch", "kernels"):  # both hold the stand-in
        del sys.modules[f"rlq.quantize.gpu.{name}"]
        delattr(sys.modules["rlq.quantize.gpu"], name)


def test_without_a_working_compiler_plain_torch_takes_over_with_one_warning(cuda):
    x, scheme = torch.randn(8, 64), TensorScheme.parse("fp8.channel")
    with pytest.warns(UserWarning, match=r"fp8.channel .*plain torch .*RuntimeError: Failed to find C compiler"):
        assert not cuda.can_encode(scheme, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cuda.can_encode(scheme, x)
        assert not cuda.can_decode(cpu.encode(x, scheme, None), torch.float32)
        # Neither of these reaches the compiler.
        assert not cuda.can_encode(scheme, x.double())
        assert not cuda.can_encode(scheme, x[:0])


@pytest.mark.parametrize(
    ("name", "columns", "size"),
    [
        ("fp8.channel", 4096, (1, 1, 4096, 4)),
        ("fp8.token", 576, (1, 1, 1024, 1)),
        ("int8.token", 1, (1, 1, 16, 1)),
        ("fp8.channel", 65536, (1, 1, 65536, 32)),
        ("fp8.channel", 65537, None),
        ("fp8.tensor", 10, (1, 1, 4096, 4)),
        ("int4.group128", 8192, (1, 32, 128, 4)),
        ("nvfp4", 8192, (1, 256, 16, 4)),
        ("fp8.block128x128", 8192, (128, 1, 128, 16)),
        ("fp8.group24", 8192, None),
        ("fp8.block128x1024", 8192, None),
    ],
)
def test_sizes_of_programs(name, columns, size, cuda):
    found = cuda.program(TensorScheme.parse(name), columns)
    assert (found and (found.tile_rows, found.tiles, found.tile, found.warps)) == size


def test_gpu_check_runs_on_a_cpu():
    """The whole script, in a process of its own as on a GPU, where it takes the same path with other shapes."""
    done = subprocess.run([sys.executable, CHECK, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all checks passed"
    assert not [line for line in lines[1:-1] if not line.startswith("ok ")]
    for wanted in ("nvfp4 torch ", "nvfp4 numba ", "torch._scaled_mm, fp8.channel x fp8.token ", "vLLM's kernels "):
        assert any(line.startswith(f"ok   {wanted}") for line in lines), wanted
    triton = next(line for line in lines if "triton " in line.lower())
    assert ("codes, scales and values equal" in triton) or ("not installed" in triton)


def test_gpu_check_fails_where_a_code_differs(monkeypatch):
    found = runpy.run_path(str(CHECK))
    scheme = TensorScheme.parse("fp8.channel")

    def off_by_one(x, scheme, given=None):
        q = exact(x, scheme, given)
        q.codes.view(torch.uint8)[-1, -1] += 1
        return q

    exact = reference.encode
    assert found["check_codes"]("torch", reference, scheme, "cpu")[1]
    monkeypatch.setattr(reference, "encode", off_by_one)
    assert found["check_codes"]("torch", reference, scheme, "cpu")[1:] == (
        False,
        "codes of other bits, torch.bfloat16 (40, 160)",
    )


def test_gpu_check_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runpy.run_path(str(CHECK))["main"]([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
