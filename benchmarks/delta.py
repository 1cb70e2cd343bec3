"""Deltas of quantized snapshots against the best deltas of the bf16 checkpoints that they are made from.

On checkpoints of real GRPO runs, recorded once: `python benchmarks/delta.py --record DIR`. SmolLM2 comes as a package,
see smollm2.py. Also times encoding and applying, and traces what decoding holds in memory.
"""

import argparse
import itertools
import statistics
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record_steps import FOLDER, RECORDINGS, checkpoints, record, timings
from safetensors.torch import load_file
from support.bf16_deltas import flat, gaps_and_zstd, ideal, others
from support.common import interleave, report, row, seconds

from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, delta, snapshot, tensor_digest
from rlq.weights.quantize import quantize_weights

GOALS = {"fp8": 6, "int8": 12, "nvfp4": 30}
WHOLE_GOAL = 300
BEST, LITERAL = "best bf16 delta", "bf16 gaps and values through zstd"
IDEAL = "ideal bf16 coder that sees the old weights"
WEIGHTS, MODEL, CHECKPOINT = "bf16 weights", "whole model, bf16 delta", "whole model, bf16 checkpoint"
TIMED = "smollm2-1e-6-spread"
ROUNDS = 5
MIB = 2**20

Weights = dict[str, torch.Tensor]
Versions = tuple[Snapshot, Snapshot]


def pairs(directory: Path, name: str) -> Iterator[tuple[Weights, Weights]]:
    """Consecutive checkpoints of a recording."""
    for before, after in itertools.pairwise(checkpoints(directory, name)):
        yield load_file(before), load_file(after)


def publish(before: Weights, after: Weights, scheme: str) -> Versions:
    """Both checkpoints as samplers would get them."""
    preset = Scheme.preset(scheme)
    return snapshot(before.items(), preset, 0), snapshot(after.items(), preset, 1)


def only(versions: Versions, modules: set[str]) -> Versions:
    """The wire tensors of some modules alone."""
    old, new = ({n: t for n, t in v.tensors.items() if n.rpartition(".")[0] in modules} for v in versions)
    return (
        replace(versions[0], tensors=old, digest=tensor_digest(old)),
        replace(versions[1], tensors=new, digest=tensor_digest(new)),
    )


def changed(versions: Versions) -> float:
    """Share of elements that differ, scales left out."""
    old, new = (flat({n: t for n, t in v.tensors.items() if "scale" not in n}) for v in versions)
    return float((old != new).mean())


def compare(before: Weights, after: Weights) -> dict[str, float]:
    """All ratios of one pair of checkpoints."""
    versions = {name: publish(before, after, name) for name in ("bf16", *GOALS)}
    scales = ".weight_scale"
    modules = {name.removesuffix(scales) for name in versions["fp8"][0].tensors if name.endswith(scales)}
    bf16 = only(versions["bf16"], modules)
    old, new = (flat(version.tensors) for version in bf16)
    own = len(delta.encode(*bf16))
    literal = gaps_and_zstd(old, new)
    variants = {"gaps and values, zstd": literal, "rlq's codec": own} | others(old, new)
    best = min(variants, key=lambda name: variants[name])
    print(
        f"     bf16 side, {new.nbytes} bytes: " + ", ".join(f"{n} {size}" for n, size in variants.items()), flush=True
    )
    whole = len(delta.encode(*versions["bf16"]))
    out = {
        "rlq's codec on bf16 over the best bf16 delta, bytes": own / variants[best],
        "bf16 changed": changed(bf16),
        "bf16 ideal": ideal(old, new),
    }
    for name in GOALS:
        quantized = only(versions[name], modules)
        size, model = len(delta.encode(*quantized)), len(delta.encode(*versions[name]))
        codes = (flat({n: t for n, t in v.tensors.items() if "scale" not in n}) for v in quantized)
        out |= {
            f"{name}, changed": changed(quantized),
            f"{name}, {BEST}": variants[best] / size,
            f"{name}, {LITERAL}": literal / size,
            f"{name}, {IDEAL}": out["bf16 ideal"] / size,
            f"{name}, both ideal": out["bf16 ideal"] / ideal(*codes),
            f"{name}, {WEIGHTS}": new.nbytes / size,
            f"{name}, {MODEL}": whole / model,
            f"{name}, {CHECKPOINT}": versions["bf16"][1].nbytes / model,
        }
    return out


def ratios(directory: Path, name: str) -> list[dict[str, Any]]:
    """Medians over the pairs of one recording; goals are for the model that they were set for."""
    found = [compare(*pair) for pair in pairs(directory, name)]
    median = {what: statistics.median(f[what] for f in found) for what in found[0]}
    print(f"     {name}, medians: " + ", ".join(f"{what} {value:.4g}" for what, value in median.items()), flush=True)
    own = "rlq's codec on bf16 over the best bf16 delta, bytes"
    rows = [row(f"{name}, {100 * median['bf16 changed']:.3g}% of bf16 changed: {own}", median[own])]
    for scheme, least in GOALS.items():
        title = f"{name}, {scheme}, {100 * median[f'{scheme}, changed']:.2g}% of codes changed"
        goals = {BEST: least} if name.startswith("smollm2") else {}
        if scheme == "fp8" and goals and RECORDINGS[name].learning_rate == 1e-6:
            goals |= {WEIGHTS: WHOLE_GOAL, CHECKPOINT: WHOLE_GOAL}
        for what in (BEST, LITERAL, IDEAL, *((WEIGHTS, MODEL, CHECKPOINT) if scheme == "fp8" else ())):
            value, goal = median[f"{scheme}, {what}"], goals.get(what)
            text, ok = ("", None) if goal is None else (f">= {goal}", value >= goal)
            rows.append(row(f"{title}: {what} over rlq's delta", value, text, ok))
    return rows


def speed(directory: Path) -> list[dict[str, Any]]:
    """Encoding, decoding and applying against quantizing the same checkpoint."""
    before, after = next(pairs(directory, TIMED))
    step = statistics.median(record["step_time"] for record in timings(directory, TIMED))
    rows = [row(f"{TIMED}: step of the recording, s", step)]
    for name in GOALS:
        old, new = publish(before, after, name)
        blob, held = delta.encode(old, new), {n: delta.flat_integers(t.clone()) for n, t in old.tensors.items()}
        sides = {
            "quantize": lambda s=new.scheme: [None for _ in quantize_weights(after, s)],
            "encode": lambda o=old, n=new: delta.encode(o, n),
            "decode": lambda b=blob: [None for _ in delta.open_delta(b).patches()],
            "scatter": lambda b=blob, h=held: [p.apply_(h[n]) for n, p in delta.open_delta(b).patches()],
            "apply": lambda o=old, b=blob: delta.apply(o, b),
        }
        took = interleave({side: lambda w=work: seconds(w) for side, work in sides.items()}, ROUNDS)
        share = (took["quantize"] + took["encode"] + took["scatter"]) / step
        rows += [
            row(f"{name}: encode over quantize, time", took["encode"] / took["quantize"]),
            row(f"{name}: encode, MB of snapshot per s", new.nbytes / took["encode"] / 1e6),
            row(f"{name}: decode, ms", 1e3 * took["decode"]),
            row(f"{name}: decode and scatter in place, ms", 1e3 * took["scatter"]),
            row(
                f"{name}: apply into a new snapshot and hash it, MB of snapshot per s", new.nbytes / took["apply"] / 1e6
            ),
            row(f"{name}: quantize, encode, decode and scatter over a step, %", 100 * share),
        ]
    return rows


def memory(directory: Path) -> dict[str, Any]:
    """Peak while decoding, beyond the positions and values of the largest tensor."""
    blob = delta.encode(*publish(*next(pairs(directory, "smollm2-1e-5-spread")), "fp8"))
    largest = 0
    tracemalloc.start()
    for _, patch in delta.open_delta(blob).patches():
        largest = max(largest, patch.values.nbytes + (0 if patch.where is None else patch.where.nbytes))
        del patch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return row("fp8: peak of decoding beyond the largest tensor's changes, MiB", (peak - largest) / MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, default=FOLDER, help="where the recorded checkpoints are")
    parser.add_argument("--record", type=Path, metavar="DIR", help="record them there first (an hour, 5 GB)")
    arguments = parser.parse_args()
    directory = arguments.record or arguments.steps
    if arguments.record:
        record(directory)
    missing = [name for name, r in RECORDINGS.items() if len(checkpoints(directory, name)) < len(r.kept)]
    if missing:
        command = f"python benchmarks/delta.py --record {directory}"
        print(f"skipped: no recording of {', '.join(missing)} in {directory}; make it with {command}")
        return
    rows = [line for name in RECORDINGS for line in ratios(directory, name)]
    report("delta", [*rows, *speed(directory), memory(directory)])


if __name__ == "__main__":
    main()
