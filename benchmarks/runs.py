"""Whole runs of every scheme over seeds, the same seed twice, and where a step's time goes.

Each run is `launch/grpo_fp8.py` with the scheme's configuration in a fresh process, one after the other. Draws
docs/curves.png and writes the table of schemes into docs/results.md.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.common import ROOT, report, row, write_block

from trainers.tracking.curves import plot_curves

SCHEMES = ("fp8", "bf16", "fp8_static", "fp8_block", "int8", "nvfp4", "nvfp4a16", "mxfp4")
SEEDS = (0, 1, 2)
WINDOW = 5  # steps averaged at either end
OVERHEAD = (
    *("sync/quantize_s", "sync/ship_s", "sync/install_s"),
    *("time/bridge_s", "time/track_s", "time/canary_s", "time/calibrate_s"),
)
CLOCKS = ("time", "step_time", "_s", "tokens_per_s")


def run(scheme: str, seed: int, directory: Path) -> tuple[list[dict[str, Any]], float]:
    """Records and wall seconds of one run."""
    start = time.perf_counter()
    flags = ["--config", ROOT / f"configs/grpo_{scheme}.yaml", "--seed", str(seed), "--output_dir", directory]
    command = [sys.executable, ROOT / "launch/grpo_fp8.py", *flags]
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    seconds = time.perf_counter() - start
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()], seconds


def accuracy(records: list[dict[str, Any]]) -> float:
    return statistics.mean(r["rlq/rollout/accuracy"] for r in records)


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


def overhead(records: list[dict[str, Any]]) -> float:
    """Median share of a step's wall time that is neither generation nor learner compute."""
    shares = []
    for before, after in itertools.pairwise(records):
        spent = sum(after.get(f"rlq/{name}", 0.0) for name in OVERHEAD)
        shares.append(spent / (after["time"] - before["time"]))
    return statistics.median(shares)


def write_table(arms: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Per scheme, over its runs: what it reaches, how far samplers are from the learner, what a step sends."""
    lines = [
        "| scheme | accuracy, last 5 steps | +- | k3 | clipped | ESS, tokens | ESS, sequences | bytes per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for scheme, runs in arms.items():
        final = [accuracy(records[-WINDOW:]) for records in runs]
        names = ("sampler_kl_k3", "clip_frac_high", "ess_token", "ess_seq", "sync/bytes")
        k3, clip, token, seq, size = (statistics.mean(r[f"rlq/{n}"] for rs in runs for r in rs) for n in names)
        lines.append(
            f"| `{scheme}` | {statistics.mean(final):.3f} | {standard_error(final):.3f} | {k3:.1e} | {clip:.2%} | "
            f"{token:.4f} | {seq:.3f} | {size:,.0f} |"
        )
    write_block("results.md", "runs", lines)


def main() -> None:
    arms: dict[str, list[list[dict[str, Any]]]] = {scheme: [] for scheme in SCHEMES}
    walls: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in SEEDS:
            for scheme in SCHEMES:  # they take turns
                records, wall = run(scheme, seed, Path(scratch) / f"{scheme}-{seed}")
                arms[scheme].append(records)
                walls.append((scheme, wall))
                print(f"     {scheme} seed {seed}: {accuracy(records[-WINDOW:]):.3f} in {wall:.0f} s", flush=True)
        twin, _ = run("fp8", SEEDS[0], Path(scratch) / "twin")
    write_table(arms)
    plot_curves(
        {f"{s} {seed}": records for s in ("fp8", "bf16") for seed, records in zip(SEEDS, arms[s], strict=True)},
        ROOT / "docs/curves.png",
    )
    first = statistics.mean(accuracy(r[:WINDOW]) for r in arms["fp8"])
    final = {scheme: [accuracy(r[-WINDOW:]) for r in runs] for scheme, runs in arms.items()}
    means = {scheme: statistics.mean(values) for scheme, values in final.items()}
    bound = 2 * (standard_error(final["fp8"]) ** 2 + standard_error(final["bf16"]) ** 2) ** 0.5
    same = all(
        {k: v for k, v in a.items() if not k.endswith(CLOCKS)} == {k: v for k, v in b.items() if not k.endswith(CLOCKS)}
        for a, b in zip(arms["fp8"][0], twin, strict=True)
    )
    share = statistics.median(overhead(records) for records in arms["fp8"])
    bridge = statistics.median(r["rlq/time/bridge_s"] / r["step_time"] for rs in arms["fp8"] for r in rs[5:])
    k3 = {s: statistics.mean(r["rlq/sampler_kl_k3"] for rs in runs for r in rs) for s, runs in arms.items()}
    gap = abs(means["fp8"] - means["bf16"])
    report(
        "runs",
        [
            row(
                "one run from start to summary, without `make run`'s Ray head, s",
                statistics.median(wall for scheme, wall in walls if scheme == "fp8"),
            ),
            row(f"fp8 sampling accuracy, first {WINDOW} steps", first, "<= 0.45", first <= 0.45),
            row(f"fp8 sampling accuracy, last {WINDOW} steps", means["fp8"], ">= 0.90", means["fp8"] >= 0.90),
            row(f"bf16 sampling accuracy, last {WINDOW} steps", means["bf16"]),
            row("|fp8 - bf16| final accuracy, 3 seeds", gap, f"<= 2 SE = {bound:.3f}", gap <= bound),
            row("same seed in fresh processes: records identical (1 = yes)", same, "1", same),
            row("share of a step outside generation and learner compute", share, "<= 0.08", share <= 0.08),
            row("share of a step inside the bridge", bridge, "<= 0.01", bridge <= 0.01),
            row("fp8 sampler KL k3, mean over the runs", k3["fp8"]),
            row("bf16 sampler KL k3, mean over the runs (against fp32 masters)", k3["bf16"]),
        ],
    )


if __name__ == "__main__":
    main()
