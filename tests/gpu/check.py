#!/usr/bin/env python3
"""What can only be checked on an NVIDIA GPU; needs PyTorch and this checkout, nothing else, and no installation.

    python3 tests/gpu/check.py                  # `make gpu-check`
    python3 tests/gpu/check.py --device cpu     # the same code on a CPU: small shapes, Triton's interpreter

Codes, scales and values of every scheme against the CPU's, bit for bit, for the plain-torch path and the Triton path
separately; throughput of both over a device copy; PyTorch's own FP8 matrix product against the emulated linear; and,
where vLLM is installed, which kernels it really runs, and, where Ray is too, that its transfer engines carry versions.
Exit code 0 all passed, 1 a check failed, 2 no CUDA device.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
if "cpu" in sys.argv:  # read when Triton's kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from rlq.emulate.linear import emulated_linear, quantize_heads
from rlq.errors import SnapshotError
from rlq.formats.schemes import KV_CACHES, PRESETS, TensorScheme
from rlq.quantize import quantize, quantize_activations, reference
from rlq.quantize.selfcheck import hurtful, same

Row = tuple[str, bool, str]
INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("triton", "vllm", "ray")}
SHAPES = {"cuda": ((4096, 4096), (576, 1536), (130, 257)), "cpu": ((40, 160), (37, 67))}
COPY = {"cuda": (8192, 8192), "cpu": (256, 1024)}
DTYPES = (torch.bfloat16, torch.float32)
EXTRA = ("int4.token", "int8.group64", "fp8_e5m2.tensor")  # of KV caches and of users' own schemes
SERVED = ("fp8", "int8", "w4a16", "nvfp4a16")
SERVED_CONFIG = ROOT / "configs/models/sort_digits"


def schemes() -> list[TensorScheme]:
    """Every tensor scheme of a preset, and a few more."""
    found = {scheme for p in PRESETS.values() for scheme in (p.weights, p.activations) if scheme is not None}
    return sorted(found | {TensorScheme.parse(name) for name in EXTRA}, key=str)


def paths(device: str) -> Iterator[tuple[str, ModuleType]]:
    """The implementations that can run on the device, with their names."""
    yield "torch", reference
    if device == "cpu" and importlib.util.find_spec("numba") is not None:
        from rlq.quantize.cpu import launch as cpu

        yield "numba", cpu
    if INSTALLED["triton"]:
        from rlq.quantize.gpu import launch as cuda

        if device == "cpu":
            cuda.PER_PROGRAM = 256  # the interpreter takes a millisecond per program and operation
        yield "triton", cuda


def takes(path: ModuleType, scheme: TensorScheme, x: torch.Tensor) -> bool:
    """True if an implementation goes there; whether Triton's is exact is what is to be found out, so not asked."""
    if path is reference:
        return True
    if path.__name__.endswith("cuda"):
        return path.program(scheme, x.shape[-1]) is not None
    return path.can_encode(scheme, x.shape)


def check_codes(name: str, path: ModuleType, scheme: TensorScheme, device: str) -> Row:
    """One implementation on the device against the CPU's quantizers, on all shapes and dtypes."""
    title, compared = f"{scheme} {name}", 0
    for shape in SHAPES[device]:
        for dtype in DTYPES:
            x = hurtful(shape, dtype, scheme)
            there = x.to(device)
            if not takes(path, scheme, there):
                continue
            compared += 1
            here = quantize(x, scheme)
            given = here.scale if scheme.granularity == "tensor" else here.global_scale
            found = path.encode(there, scheme, None if given is None else given.to(device))
            for part in ("codes", "scale"):
                if not same(getattr(here, part), getattr(found, part).cpu()):
                    return title, False, f"{part} of other bits, {dtype} {shape}"
            if not same(here.dequantize(dtype), path.decode(found, dtype).cpu()):
                return title, False, f"dequantized values differ, {dtype} {shape}"
            if scheme.granularity.startswith("block"):
                continue
            fake = path.encode_activations if path is reference else path.fake_quantize_rows
            if not same(quantize_activations(x, scheme), fake(there, scheme, None).cpu()):
                return title, False, f"rounded activations differ, {dtype} {shape}"
    return title, True, f"codes, scales and values equal the CPU's, {compared} tensors" if compared else "not taken"


def check_public(device: str) -> Iterator[Row]:
    """What a caller gets: the Triton path is in use where it exists, non-finite weights are refused, caches agree."""
    if INSTALLED["triton"] and device == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for scheme in schemes():
                quantize(hurtful((256, 512), torch.bfloat16, scheme).to(device), scheme)
        yield "Triton path in use for every scheme", not caught, "; ".join(str(w.message) for w in caught) or "yes"
    x = torch.randn(64, 256)
    x[3, 5] = float("inf")
    for scheme in schemes():
        try:
            quantize(x.to(device), scheme)
        except SnapshotError:
            continue
        yield f"{scheme} refuses infinity", False, "it was quantized"
        return
    yield "non-finite weights are refused", True, f"by {len(schemes())} schemes"
    heads = torch.randn(32, 4, 64, dtype=torch.bfloat16)
    for kv_cache in KV_CACHES:
        equal = same(quantize_heads(heads, kv_cache, 64), quantize_heads(heads.to(device), kv_cache, 64).cpu())
        yield f"{kv_cache} keys and values", equal, "equal the CPU's" if equal else "differ"


def timer(device: str) -> Callable[[Callable[[], object]], float]:
    """A function that gives the seconds of one call on the device."""

    def on_gpu(work: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def on_cpu(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return on_gpu if device == "cuda" else on_cpu


def check_speed(name: str, path: ModuleType, scheme: TensorScheme, device: str) -> Row:
    """Bytes per second of encoding over those of a copy; a figure, not a pass or fail.

    Median of 20 rounds after 3, a copy and an encoding in turns, on a matrix several times the size of the caches.
    """
    title = f"{scheme} {name}, bandwidth over a copy's"
    if device == "cpu" and name == "triton":
        return title, True, "interpreted, so not timed"
    x = torch.randn(COPY[device], device=device, dtype=torch.bfloat16)
    if not takes(path, scheme, x):
        return title, True, "not taken"
    target, q = torch.empty_like(x), quantize(x, scheme)
    given = q.scale if scheme.granularity == "tensor" else q.global_scale
    seconds, rounds = timer(device), []
    for _ in range(23):
        rounds.append((seconds(lambda: target.copy_(x)), seconds(lambda: path.encode(x, scheme, given))))
    copy, encode = (sorted(side)[10] for side in zip(*rounds[3:], strict=True))
    rate, limit = (x.nbytes + q.nbytes) / encode, 2 * x.nbytes / copy
    return (
        title,
        True,
        f"{rate / limit:.0%} ({rate / 1e9:.0f} of {limit / 1e9:.0f} GB/s, {encode / copy:.1f}x its time)",
    )


def check_scaled_mm(weights: str, activations: str, device: str) -> Row:
    """torch._scaled_mm against the emulated linear, relative to the largest output."""
    title = f"torch._scaled_mm, {weights} x {activations}"
    needed = (9, 0) if weights == "fp8.channel" else (8, 9)
    if device == "cuda" and torch.cuda.get_device_capability() < needed:
        return title, True, f"needs compute capability {needed[0]}.{needed[1]}"
    w = torch.randn(1024, 2048, device=device, dtype=torch.bfloat16)
    x = torch.randn(256, 2048, device=device, dtype=torch.bfloat16)
    qw, qx = quantize(w, weights), quantize(x, activations)
    scale_b = qw.scale.t().contiguous()  # (1,), or (1, out)
    real = torch._scaled_mm(qx.codes, qw.codes.t(), scale_a=qx.scale, scale_b=scale_b, out_dtype=torch.bfloat16)
    emulated = emulated_linear(x.float(), qw.dequantize(), None, TensorScheme.parse(activations))
    error = float((real.float() - emulated).abs().max() / emulated.abs().max())
    return title, error < 2**-8, f"largest error {error:.1e} of the largest output (bf16 rounds at 2e-3)"


def check_vllm(scheme: str) -> Row:
    """Serve a small checkpoint with vLLM alone: its quantized layers run on kernels."""
    title = f"vLLM's kernels, {scheme}"
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        commands = [
            ["-m", "rlq.cli.main", "quantize", str(SERVED_CONFIG), f"{directory}/out", "--scheme", scheme],
            [str(ROOT / "tests/support/own_loader_worker.py"), f"{directory}/out", "bfloat16"],
        ]
        for command in commands:
            done = subprocess.run(
                [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=300
            )
            if done.returncode != 0:
                return title, False, (done.stderr.strip() or done.stdout).splitlines()[-1]
    running = json.loads(done.stdout.splitlines()[-1])["kernels"]
    kernels = [name for name in running if name.endswith("Kernel")]
    others = set(running) - {*kernels, "UnquantizedLinearMethod"}
    return title, bool(kernels) and not others, ", ".join(f"{count} x {name}" for name, count in running.items())


def check_transfer(backend: str, gpus: int) -> Row:
    """Versions through vLLM's transfer engines, from this process' GPU to samplers' processes."""
    title = f"vLLM's weight transfer, {backend}"
    missing = [name for name in ("vllm", "ray") if not INSTALLED[name]]
    if missing:
        return title, True, f"not asked: {' and '.join(missing)} not installed"
    if gpus > torch.cuda.device_count():
        return title, True, f"not asked: needs {gpus} GPUs"
    command = [sys.executable, str(ROOT / "tests/gpu/transfer.py"), backend, "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        return title, False, (done.stderr.strip() or done.stdout).splitlines()[-1]
    found = json.loads(done.stdout.splitlines()[-1])
    return title, found["equal"], f"whole versions at {found['bytes_per_s'] / 1e9:.1f} GB/s, host memory to host memory"


def rows(device: str) -> Iterator[Row]:
    """Everything, in order."""
    if not INSTALLED["triton"]:
        yield "Triton path", True, "not installed: plain torch is used on this device"
    for scheme in schemes():
        for name, path in paths(device):
            yield check_codes(name, path, scheme, device)
    yield from check_public(device)
    yield check_scaled_mm("fp8.tensor", "fp8.tensor", device)
    yield check_scaled_mm("fp8.channel", "fp8.token", device)
    for scheme in schemes():
        for name, path in paths(device):
            yield check_speed(name, path, scheme, device)
    if not INSTALLED["vllm"]:
        yield "vLLM's kernels", True, "not installed"
    elif device == "cpu":
        yield "vLLM's kernels", True, "not asked on a CPU: tests/integration/test_own_loader.py does"
    else:
        yield from (check_vllm(scheme) for scheme in SERVED)
    if device == "cpu":
        yield "vLLM's weight transfer", True, "not asked on a CPU: tests/integration/test_vllm_transfer.py does"
    else:
        yield from (check_transfer(backend, gpus) for backend, gpus in (("ipc", 1), ("nccl", 2)))


def main(arguments: list[str] | None = None) -> int:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args(arguments).device
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no CUDA device; run this on a machine with an NVIDIA GPU and a CUDA build of PyTorch")
        return 2
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        hardware = "CPU, to exercise this script"
        torch.set_num_threads(1)  # such small tensors wait for threads longer than they compute
    print(f"{hardware}, torch {torch.__version__}")
    failed = 0
    for name, ok, detail in rows(device):
        failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name:<52} {detail}", flush=True)
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
