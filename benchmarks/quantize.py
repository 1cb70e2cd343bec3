"""Quantizers against a memcpy, against compressed-tensors, and an emulated linear against a plain one; one thread.

Ratios of thread time within one run, interleaved, so that a busy machine slows both sides.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compressed-tensors wraps its FP4 cast in torch.compile

import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from support.common import interleave, report, row

from rlq.emulate.linear import emulated_linear
from rlq.formats.schemes import Scheme, TensorScheme
from rlq.quantize import quantize
from rlq.weights.compressed_tensors import quantization_config

ROUNDS = 7
# Goal for the whole tensor over a bf16 memcpy of it: 4096 x 4096, and 576 x 1536.
GOALS = {
    "fp8.channel": (2.5, 5),
    "fp8.block128x128": (3, 5),
    "int8.channel": (1.5, 5),
    "mxfp4": (4, 5),
    "nvfp4": (8, 15),
}
THEIRS = {"fp8.channel": 15, "fp8.block128x128": 15, "int8.channel": 15, "mxfp4": 15, "nvfp4": 40}
LINEAR = {"fp8": 1.2, "nvfp4": 1.4, "int8": None, "mxfp4": None}
MEMORY_GOAL = 16 << 20


def timed(work: Callable[[], Any], repeat: int = 1) -> Callable[[], float]:
    """Thread seconds of one call: other processes' share of the core does not count."""

    def run() -> float:
        start = time.thread_time()
        for _ in range(repeat):
            work()
        return (time.thread_time() - start) / repeat

    return run


def against_memcpy(shape: tuple[int, int], which: int) -> list[dict]:
    x = weight(shape)
    copy = torch.empty_like(x)
    repeat = max(1, (1 << 22) // x.numel())
    rows = []
    for name, goals in GOALS.items():
        sides = {
            "memcpy": timed(lambda: copy.copy_(x), repeat),
            "ours": timed(lambda name=name: quantize(x, name), repeat),
        }
        found = interleave(sides, ROUNDS)
        ratio, goal = found["ours"] / found["memcpy"], goals[which]
        rows.append(row(f"{name} {shape[0]} x {shape[1]}, over a memcpy", ratio, f"<= {goal}", ratio <= goal))
    return rows


def their_quantizer(name: str) -> Callable[[torch.Tensor], Any]:
    """compressed-tensors: scales from minima and maxima, then codes, packed as its checkpoints are."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = TensorScheme.parse(name)
    config = quantization_config(Scheme("test", scheme, None), [])
    group = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    weights = group.weights
    assert weights is not None

    def run(x: torch.Tensor) -> Any:
        tile_rows, tile = scheme.tile(*x.shape)
        tiles = x.view(x.shape[0] // tile_rows, tile_rows, -1, tile).transpose(1, 2).flatten(2)
        low, high = tiles.amin(-1).float(), tiles.amax(-1).float()
        state: dict[str, Any] = {"weight": x}
        if name == "nvfp4":
            state["weight_global_scale"] = generate_gparam(low.min(), high.max())
        scale, _ = calculate_qparams(low, high, weights, global_scale=state.get("weight_global_scale"))
        return compressor.compress({**state, "weight_scale": scale}, group)

    return run


def against_compressed_tensors() -> list[dict]:
    x = weight((2048, 2048))
    rows = []
    for name, goal in THEIRS.items():
        theirs = their_quantizer(name)
        sides = {"theirs": timed(lambda f=theirs: f(x)), "ours": timed(lambda name=name: quantize(x, name))}
        found = interleave(sides, 5, warmup=1)
        ratio = found["theirs"] / found["ours"]
        rows.append(row(f"{name}: compressed-tensors over ours, 2048 x 2048", ratio, f">= {goal}", ratio >= goal))
    return rows


def linear() -> list[dict]:
    x, w = torch.randn(64, 576), torch.randn(1536, 576)
    rows = []
    for name, goal in LINEAR.items():
        activations = Scheme.preset(name).activations
        plain = timed(lambda: torch.nn.functional.linear(x, w), 20)
        emulated = timed(lambda a=activations: emulated_linear(x, w, None, a), 20)
        found = interleave({"plain": plain, "emulated": emulated}, 15)
        ratio = found["emulated"] / found["plain"]
        text, ok = (f"<= {goal}", ratio <= goal) if goal else ("", None)
        rows.append(row(f"{name}: emulated Linear(576, 1536) on 64 tokens, over a plain one", ratio, text, ok))
    return rows


def memory() -> list[dict]:
    """Peak resident memory while a tensor is quantized, beyond its codes and scales; each scheme in a fresh process."""
    rows = []
    for name in GOALS:
        found = subprocess.run([sys.executable, __file__, name], check=True, stdout=subprocess.PIPE, text=True)
        extra = int(found.stdout)
        rows.append(row(f"{name}: peak memory beyond the result, MB", extra / 1e6, "<= 16.8", extra <= MEMORY_GOAL))
    return rows


def peak_beyond_result(name: str) -> int:
    """Bytes; what was freed before is given back first, or the tensor would find room there and the peak stay low."""
    x = weight((8192, 8192))
    quantize(x[:128], name)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the kernel's peak starts anew
    before = status("VmRSS")
    q = quantize(x, name)
    return status("VmHWM") - before - q.nbytes


def status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def weight(shape: tuple[int, int]) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print(peak_beyond_result(sys.argv[1]))
        return
    rows = against_memcpy((4096, 4096), 0) + against_memcpy((576, 1536), 1)
    report("quantize", rows + against_compressed_tensors() + linear() + memory())


if __name__ == "__main__":
    main()
