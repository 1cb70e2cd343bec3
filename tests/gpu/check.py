#!/usr/bin/env python3
"""What can only be checked on an NVIDIA GPU; needs PyTorch and this checkout, nothing else, and no installation.

    python3 tests/gpu/check.py        # `make gpu-check`

Codes and scales of every scheme against the CPU's, bit for bit; quantizer throughput over a device copy; and PyTorch's
own FP8 matrix product against the emulated linear. Exit code 0 all passed, 1 a check failed, 2 no CUDA device.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from rlq.linear import emulated_linear
from rlq.quantize import quantize
from rlq.schemes import PRESETS, TensorScheme

SHAPES = ((4096, 4096), (576, 1536), (130, 257))
COPY = (8192, 8192)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same bytes."""
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def hurtful(shape: tuple[int, int]) -> torch.Tensor:
    """bf16 values over 40 binades, with a zero row, a zero block and negative zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    x[0], x[:16, :16], x[1, ::3] = 0.0, 0.0, -0.0
    return x.to(torch.bfloat16)


def check_codes(scheme: TensorScheme) -> tuple[str, bool, str]:
    """Compare GPU and CPU on all shapes."""
    for shape in SHAPES:
        x = hurtful(shape)
        here, there = quantize(x, scheme), quantize(x.cuda(), scheme)
        for suffix, tensor in here.to_wire().items():
            if not equal(tensor, there.to_wire()[suffix]):
                return f"{scheme} codes and scales", False, f"{suffix} differs at {shape}"
        if not equal(here.dequantize(), there.dequantize()):
            return f"{scheme} codes and scales", False, f"dequantized values differ at {shape}"
    return f"{scheme} codes and scales", True, "equal to the CPU's, bit for bit"


def seconds(work, repeats: int = 20) -> float:
    """Median time of one call on the device."""
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[3:])[repeats // 2]


def check_speed(scheme: TensorScheme) -> tuple[str, bool, str]:
    """Time of quantizing over time of copying the same bf16 matrix; a figure, not a pass or fail."""
    x = torch.randn(COPY, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(x)
    ratio = seconds(lambda: quantize(x, scheme)) / seconds(lambda: target.copy_(x))
    return f"{scheme} quantize over bf16 copy", True, f"{ratio:.1f}x"


def check_scaled_mm() -> tuple[str, bool, str]:
    """torch._scaled_mm on row-wise scales against the emulated linear, relative to the largest output."""
    name = "torch._scaled_mm, fp8.channel x fp8.token"
    if torch.cuda.get_device_capability() < (8, 9):
        return name, True, "this GPU has no FP8 matrix product"
    w = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)
    qw, qx = quantize(w, "fp8.channel"), quantize(x, "fp8.token")
    real = torch._scaled_mm(
        qx.codes, qw.codes.t(), scale_a=qx.scale, scale_b=qw.scale.t().contiguous(), out_dtype=torch.bfloat16
    )
    emulated = emulated_linear(x.float(), qw.dequantize(), None, TensorScheme.parse("fp8.token"))
    error = float((real.float() - emulated).abs().max() / emulated.abs().max())
    return name, error < 2**-8, f"largest error {error:.1e} of the largest output (bf16 output rounds at 2e-3)"


def main() -> int:
    """Run everything and print one table."""
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device; run this on a machine with an NVIDIA GPU and a CUDA build of PyTorch")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    schemes = {scheme for p in PRESETS.values() for scheme in (p.weights, p.activations) if scheme is not None}
    rows = [check_codes(scheme) for scheme in sorted(schemes, key=str)]
    rows += [check_speed(scheme) for scheme in sorted(schemes, key=str)]
    rows.append(check_scaled_mm())
    for name, ok, detail in rows:
        print(f"{'ok  ' if ok else 'FAIL'} {name:<44} {detail}")
    return 0 if all(ok for _, ok, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
