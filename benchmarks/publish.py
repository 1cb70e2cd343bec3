"""Publishing a real model: SmolLM2-135M-Instruct, recorded GRPO steps, one vLLM actor per scheme.

Quantize + ship + install of whole FP8 versions against the same path with bf16, what a delta saves, how long the engine
stands still, what the receiver needs in memory, and the share of a step. Needs a recording; `python benchmarks/delta.py
--record DIR` makes one.
"""

import os

os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ctypes
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from record_steps import FOLDER
from safetensors.torch import load_file
from support.common import report, row, seconds, write_block

from rlq.formats.schemes import Scheme
from rlq.plan import publishing as scaling
from rlq.plan.publishing import Rates
from rlq.publish import Snapshot, delta, snapshot
from rlq.types import Request, Sampling
from samplers.options import SamplerConfig
from samplers.pool.pool import SamplerPool

ROUNDS = 5
PAIRS = 20
"""Whole versions of either scheme in turns: their ratio is close to its goal."""
RECORDING = "smollm2-1e-6"
PROMPT = Request(tuple(range(20, 40)), num_samples=1, seed=0)
SAMPLING = Sampling(temperature=1.0, max_tokens=2, stop_token_ids=(2,))
NEVER = 1 << 30
CORES = 16  # of a publisher and of a sampler, for the table of docs/scaling.md
WAYS = (("bf16", 16, None), ("fp8", 8, None), ("fp8 delta, 0.1%", 8, 0.001), ("nvfp4 delta, 0.02%", 4.5, 0.0002))


def masters(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Two consecutive steps, in the fp32 that a learner holds."""
    files = sorted(folder.glob("step-*.safetensors"))[:2]
    return [{name: tensor.float() for name, tensor in load_file(file).items()} for file in files]


def resident(pid: int, field: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (largest since the last reset)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


class Side:
    """One scheme: its pool, and versions that go on counting."""

    def __init__(self, scheme: str, config: dict):
        settings = SamplerConfig(sampler_scheme=scheme, num_samplers=1, sampler_max_model_len=96)
        self.pool = SamplerPool.vllm(config, settings)
        self.version = 0

    def sync(self, named: dict[str, torch.Tensor], whole_every: int) -> dict[str, float]:
        """Seconds and bytes of one publish; the read-back is waited for and not counted."""
        self.pool.fleet.options = replace(self.pool.fleet.options, whole_every=whole_every)
        self.version += 1
        start = time.perf_counter()
        snap: Snapshot = snapshot(named.items(), self.pool.scheme, self.version)
        quantized = time.perf_counter()
        found = self.pool.install(snap)
        total = time.perf_counter() - start
        self.pool.generate([PROMPT], SAMPLING, self.version)
        return {
            "total": total,
            "quantize": quantized - start,
            "ship": found.ship_s,
            "pause": found.pause_s,
            "bytes": found.shipped_bytes,
            "whole": snap.nbytes,
        }


def held_bytes(config: dict, whole: int) -> int:
    """What an emulating FP8 engine keeps: codes, their fp32 values, fp32 embeddings, and the packed head."""
    embedding = config["vocab_size"] * config["hidden_size"]
    codes = whole - 2 * embedding
    return codes + 4 * codes + 2 * 4 * embedding


def random_weights(config: dict) -> dict[str, torch.Tensor]:
    """fp32 weights of a Llama with this configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**config))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def median(found: list[dict], key: str) -> float:
    return statistics.median(each[key] for each in found[1:])


def encoding(steps: list[dict[str, torch.Tensor]], scheme: Scheme) -> float:
    """Seconds to make the delta between two versions."""
    old, new = (snapshot(step.items(), scheme, version) for version, step in enumerate(steps))
    return statistics.median(seconds(lambda: delta.encode(old, new)) for _ in range(ROUNDS))


def rates(whole: list[dict], deltas: list[dict], encode_s: float, params: int) -> Rates:
    """What `rlq.plan.publishing` needs, from one model's publishes and two loops over 64 MB."""
    block = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8)
    digest = block.nbytes / seconds(lambda: hashlib.sha256(block.data).digest())
    copy = block.nbytes / seconds(lambda: np.copyto(np.empty_like(block), block))
    wire = median(whole, "whole")
    return Rates(
        quantize=2 * params / (median(whole, "quantize") - wire / digest),
        digest=digest,
        copy=copy,
        compare=wire / encode_s,
        stage=wire / (median(whole, "ship") - wire / copy - wire / digest),
        patch=wire / (median(deltas, "ship") - encode_s - wire / digest),
        network=math.inf,
    )


def return_free_memory(_: Any) -> None:
    """Have glibc give the system what it keeps of freed memory; runs in an actor."""
    ctypes.CDLL(None).malloc_trim(0)


def receiver(pool: SamplerPool, publish: Callable[[int], dict[str, float]]) -> tuple[list[dict], float, int]:
    """Publishes, the median peak of the actor's memory during one beyond what it held before, and that.

    Before each, glibc gives back what it keeps of freed memory, so that nothing hides in its holes.
    """
    actor = pool.fleet.members[0].actor
    place: Any = ray.get(actor.where.remote())
    found, peaks, before = [], [], 0
    for round_ in range(ROUNDS + 1):
        ray.get(actor.__ray_call__.remote(return_free_memory))
        Path(f"/proc/{place.pid}/clear_refs").write_text("5")
        before = resident(place.pid, "VmRSS")
        found.append(publish(round_))
        peaks.append(resident(place.pid, "VmHWM") - before)
    return found, statistics.median(peaks[1:]), before


def write_table(known: Rates) -> None:
    """The table of docs/scaling.md, from the rates of one core."""
    lines = [
        "| parameters | nodes (samplers) | publishers | travels | GB | quantize | encode | ship | stage | in all, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rank = Rates(**{name: CORES * rate for name, rate in asdict(known).items()} | {"network": 12.5e9})
    for params, nodes, publishers in ((1.35e8, 1, 1), (8e9, 4, 8), (7e10, 16, 64), (1e12, 125, 1024)):
        for what, bits, changed in WAYS:
            p = scaling.publish(params, bits, rank, nodes=nodes, publishers=publishers, changed=changed)
            times = " | ".join(f"{t:.2g}" for t in (p.quantize_s, p.encode_s, p.ship_s, p.stage_s, p.total_s))
            lines.append(
                f"| {params:.3g} | {nodes} ({8 * nodes}) | {publishers} | {what} | {p.nbytes / 1e9:.3g} | {times} |"
            )
    write_block("scaling.md", "scaling", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, default=FOLDER, help="where the recorded checkpoints are")
    folder: Path = parser.parse_args().steps
    if not (folder / RECORDING).is_dir():
        print(f"skipped: no recording in {folder}; make it with python benchmarks/delta.py --record {folder}")
        return
    config = json.loads((folder / "smollm2/config.json").read_text())
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=1500 << 20)
    steps = masters(folder / RECORDING)
    sides = {scheme: Side(scheme, config) for scheme in ("fp8", "bf16")}
    for side in sides.values():
        side.sync(steps[0], 1)
    whole: dict[str, list[dict]] = {scheme: [] for scheme in sides}
    for round_ in range(PAIRS + 1):
        for scheme, side in sides.items():
            whole[scheme].append(side.sync(steps[round_ % 2], 1))
    sides.pop("bf16").pool.close()
    fp8 = sides["fp8"]
    deltas, peak, resident_bytes = receiver(fp8.pool, lambda round_: fp8.sync(steps[round_ % 2], NEVER))
    fp8.pool.close()
    encode_s = encoding(steps, fp8.pool.scheme)
    known = rates(whole["fp8"], deltas, encode_s, sum(t.numel() for t in steps[0].values()))

    small = config | {"num_hidden_layers": 8, "vocab_size": config["vocab_size"] // 4}
    weights, side = random_weights(small), Side("fp8", small)
    quarter = [side.sync(weights, 1) for _ in range(ROUNDS + 2)][1:]
    params = sum(t.numel() for t in weights.values())
    predicted = scaling.publish(params, 8 * median(quarter, "whole") / params, known)
    side.pool.close()

    held = held_bytes(config, int(median(whole["fp8"], "whole")))
    total = {scheme: median(found, "total") for scheme, found in whole.items()}
    ratio = total["fp8"] / total["bf16"]
    shares = {
        name: statistics.median(e["pause"] / e["total"] for e in found[1:])
        for name, found in (("whole", whole["fp8"]), ("delta", deltas))
    }
    memory = 1 + peak / held
    report(
        "publish",
        [
            row("quantize + ship + install, whole fp8 over whole bf16", ratio, "<= 1.0", ratio <= 1.0),
            row("whole fp8, s", total["fp8"]),
            row("whole fp8: quantize, check and digest, s", median(whole["fp8"], "quantize")),
            row("fp8 delta of a step at 1e-6 over whole bf16, time", median(deltas, "total") / total["bf16"]),
            row("fp8 delta of a step at 1e-6, MB", median(deltas, "bytes") / 1e6),
            *(row(f"pause over sync, {name} fp8", share, "<= 0.05", share <= 0.05) for name, share in shares.items()),
            row("pause, fp8 delta, ms", 1e3 * median(deltas, "pause")),
            row("receiver's peak during a delta over the weights it holds", memory, "<= 1.15", memory <= 1.15),
            row("receiver's peak during a delta over all that it holds", 1 + peak / resident_bytes),
            *(row(f"rate: {name}, GB/s", value / 1e9) for name, value in asdict(known).items() if value < math.inf),
            row(
                "model of docs/scaling.md for a quarter of the size, over measured",
                predicted.total_s / median(quarter, "total"),
            ),
        ],
    )
    write_table(known)


if __name__ == "__main__":
    main()
