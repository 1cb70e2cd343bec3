"""What the bridge costs, and what each cap costs in bias and variance.

    python benchmarks/bridge.py            all tables (about a minute)
    python benchmarks/bridge.py time       correction and diagnostics against the truncated weights alone
    python benchmarks/bridge.py replay     10^7 tokens, 10 estimators
    python benchmarks/bridge.py bias       exact gradient bias and deviation against the cap

Timings are medians of interleaved runs, so that a busy machine slows both sides alike.
"""

import argparse
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from support.common import report, row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlq.bridge import Correction, Rollouts, correct, read_rollouts, write_rollouts
from rlq.bridge.metrics.histogram import histogram
from rlq.bridge.replay import replay
from tests.support.enumerable import GAPS, gradient_bias

CONSOLE = Console()
TEN = (
    "rlq/default",
    "rlq/is",
    "verl/decoupled_token_icepop",
    "verl/decoupled_seq_is_rs",
    "verl/decoupled_geo_rs_token_tis",
    "verl/decoupled_k3_rs",
    "trl/sequence_mask",
    "slime/mis",
    "roll/segment",
    "prime-rl/ipo",
)


def ragged(batch: int, length: int, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Learner and sampler log-probs and a mask whose rows are 10% to 100% full."""
    generator = torch.Generator().manual_seed(0)
    sampler = -3 * torch.rand(batch, length, generator=generator)
    learner = (sampler + scale * torch.randn(batch, length, generator=generator)).clamp(max=0)
    lengths = torch.randint(length // 10, length + 1, (batch, 1), generator=generator)
    return learner, sampler, torch.arange(length) < lengths


def truncated_weights(learner: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The least that a correction can do: no checks, no counts, no metrics."""
    ratio = torch.where(mask, learner - sampler, 0.0).clamp_(-20, 20).exp_().clamp_(max=2.0)
    return torch.where(mask, ratio, 0.0)


def interleaved(functions: dict[str, Callable[[], object]], rounds: int = 60) -> dict[str, list[float]]:
    """Milliseconds of every run of each function, the first tenth left out."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: t[rounds // 10 :] for name, t in times.items()}


def time_correction() -> list[dict[str, Any]]:
    """Correction with all scalar metrics on [256, 1024] against the truncated weights alone; at most 8 times."""
    learner, sampler, mask = ragged(256, 1024, scale=0.1)
    holes = torch.where(mask, sampler, math.nan)
    far = learner - torch.where(torch.rand(mask.shape) < 1e-3, 3.0, 0.0)
    ratio = torch.where(mask, learner - sampler, 0.0)
    ell = ratio[mask]
    functions = {
        "truncated weights alone": lambda: truncated_weights(learner, sampler, mask),
        "correct, default": lambda: correct(learner, sampler, mask, Correction()),
        "correct, NaN in the padding": lambda: correct(learner, holes, mask, Correction()),
        "correct, clipped tails": lambda: correct(sampler, far, mask, Correction()),
        "correct, sequence": lambda: correct(learner, sampler, mask, Correction(level="sequence")),
        "correct, slime/mis": lambda: correct(learner, sampler, mask, Correction.preset("slime/mis")),
        "p01 and p99 by histogram": lambda: histogram(ratio, mask.sum().double(), torch.empty_like(ratio)),
        "p01 and p99 by sorting": lambda: torch.sort(ell),
    }
    times = interleaved(functions)
    medians = {name: statistics.median(t) for name, t in times.items()}
    base = medians["truncated weights alone"]
    table = Table("[256, 1024]", "median ms", "times the weights", title=f"{torch.get_num_threads()} threads")
    for name, t in times.items():
        table.add_row(name, f"{statistics.median(t):.2f}", f"{statistics.median(t) / base:.1f}")
    CONSOLE.print(table)
    default = medians["correct, default"] / base
    slowest = max(t for name, t in medians.items() if "correct" in name) / base
    return [
        row(
            "default correction and all diagnostics over the weights alone, [256, 1024]", default, "<= 8", default <= 8
        ),
        row("the slowest of five corrections (several rejection rules), the same", slowest),
    ]


def time_replay() -> list[dict[str, Any]]:
    """10^7 tokens in parquet, 10 estimators; at most 60 s and 2 GiB."""
    with tempfile.TemporaryDirectory() as folder:
        learner, sampler, mask = ragged(2048, 1024, scale=0.1)
        tokens = 0
        for step in range(9):
            advantage = torch.randn(len(mask))
            path = Path(folder) / f"step-{step:03d}.parquet"
            write_rollouts(path, Rollouts(sampler, mask, old_logprobs=learner, advantage=advantage))
            tokens += int(mask.sum())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        start = time.perf_counter()
        replay(read_rollouts(folder), {name: Correction.preset(name) for name in TEN})
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    CONSOLE.print(f"replay: {tokens:.3g} tokens, {len(TEN)} estimators; {before:.2f} GiB before it began")
    return [
        row("replay of 1.1e7 tokens under 10 corrections, s", seconds, "<= 60", seconds <= 60),
        row("replay, peak memory, GiB", peak, "<= 2", peak <= 2),
    ]


def tabulate_bias(policies: int = 8) -> list[dict[str, Any]]:
    """Bias and deviation of the policy gradient, relative to the true one, against the cap; exact, by enumeration."""
    caps = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, math.inf)
    for level in ("token", "sequence"):
        table = Table(f"{level} cap", *(f"{gap} bias / dev" for gap in GAPS))
        rows = {"none": Correction.preset("rlq/none")}
        rows |= {f"{cap:g}": Correction(level=level, upper=cap, veto=None) for cap in caps}
        for name, correction in rows.items():
            cells = []
            for kl in GAPS.values():
                results = [gradient_bias(correction, kl, seed=seed) for seed in range(policies)]
                bias = statistics.mean(r.bias for r in results)
                deviation = statistics.mean(r.deviation for r in results)
                cells.append(f"{bias:.3f} / {deviation:.2f}")
            table.add_row(name, *cells)
        CONSOLE.print(table)
    untruncated = Correction(level="sequence", upper=math.inf, veto=None)
    worst = max(gradient_bias(untruncated, kl, seed=s).bias for kl in GAPS.values() for s in range(policies))
    return [
        row("gradient bias of untruncated sequence weights on an enumerable policy", worst, "<= 1e-6", worst <= 1e-6)
    ]


def main() -> None:
    """Run the parts named on the command line, or all."""
    parts = {"time": time_correction, "replay": time_replay, "bias": tabulate_bias}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="which tables (default all)")
    report("bridge", [row for name in parser.parse_args().parts or parts for row in parts[name]()])


if __name__ == "__main__":
    main()
