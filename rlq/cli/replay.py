"""`rlq replay`: recompute corrections on dumped rollouts and compare them."""

import argparse
import math
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from ..bridge.correction.correction import Correction
from ..bridge.diagnostics.breakdown import log_ratio_histogram
from ..bridge.dump import dump_files, read_rollouts
from ..bridge.metrics.sums import METRIC_NAMES
from ..bridge.replay import Replay, replay
from ..errors import ConfigError
from .outcome import Outcome

_RAW = ("sampler_kl_k1", "sampler_kl_k3", "logratio_abs_max", "ratio_p01", "ratio_p99", "ess_token", "nonfinite_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rlq replay`."""
    parser.add_argument("dump", type=Path, help="a .parquet file, or a folder of them")
    parser.add_argument(
        "--corrections",
        required=True,
        metavar="A,B,C",
        help="presets to compare, each NAME or NAME:field=value, such as rlq/default,rlq/default:upper=4",
    )
    parser.add_argument("--learner", choices=["old_logprobs", "logprobs"], help="learner log-probs to use")
    parser.add_argument("--batch", type=int, default=512, help="completions per batch (default 512)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also draw the comparison into this folder")


def run(args: argparse.Namespace) -> Outcome:
    """Print the comparison; draw it when asked."""
    if args.batch < 1:
        raise ConfigError(f"--batch {args.batch} must be at least 1")
    corrections = {text: parse_correction(text) for text in args.corrections.split(",") if text}
    if not corrections:
        raise ConfigError("--corrections names none: give at least one preset, such as rlq/default")
    bar = Console(stderr=True)
    files = track(dump_files(args.dump), "replay", console=bar, transient=True, disable=not bar.is_terminal)
    batches = (batch for file in files for batch in read_rollouts(file, batch=args.batch))
    result = replay(batches, corrections, learner=args.learner)
    report = result.report()
    console = Console()
    _print(console, report)
    if args.plots is not None:
        console.print(f"plots={draw(result, args.plots)}", soft_wrap=True)
    return Outcome(report={"dump": str(args.dump), "corrections": report})


def parse_correction(text: str) -> Correction:
    """A preset by name, with fields changed: `rlq/default` or `rlq/default:upper=4:normalize=batch`.

    Raises:
        ConfigError: unknown preset, unknown field, or a value the field refuses.
    """
    name, *changes = text.split(":")
    fields: dict[str, object] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"correction {text!r}: write changes as field=value, such as {name}:upper=4")
        fields[key] = _value(value)
    return Correction.preset(name, **fields)


def _value(text: str) -> float | str | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _print(console: Console, report: dict[str, dict[str, float]]) -> None:
    raw = next(iter(report.values()))
    facts = [f"{name} {raw[name]:.4g}" for name in ("tokens", *_RAW) if name in raw]
    console.print(", ".join(facts), soft_wrap=True)
    table = Table(Column("correction", overflow="fold", min_width=20), box=SIMPLE_HEAD, pad_edge=False)
    for name in ("weight", "ESS", "clipped", "kept", "seqs out", "cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, metrics in report.items():
        m = dict.fromkeys(METRIC_NAMES, math.nan) | metrics
        values = (
            m["weight_mean"],
            m["ess_applied"],
            m["clip_frac_high"] + m["clip_frac_low"],
            m["kept_token_frac"],
            m["reject_seq_frac"] + m["veto_seq_frac"],
            m.get("cosine", math.nan),
        )
        table.add_row(name, *("-" if math.isnan(value) else f"{value:.3g}" for value in values))
    console.print(table)


def draw(result: Replay, folder: Path) -> Path:
    """Comparison over batches and the histogram of the log ratio, as `replay.png` in the folder.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plots needs matplotlib: pip install matplotlib, or leave --plots out") from error
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for axis, metric in zip(axes, ("weight_mean", "ess_applied", "kept_token_frac"), strict=False):
        for name, history in result.history.items():
            axis.plot([m.get(metric, math.nan) for m in history], label=name, marker="." if len(history) == 1 else None)
        axis.set(title=metric, xlabel="batch")
    axes[0].legend(fontsize=7)
    counts, edges = log_ratio_histogram(next(iter(result.sums.values())))
    axes[3].stairs(counts, edges, fill=True)
    axes[3].set(title="log ratio, learner minus sampler", xlabel="nats", yscale="log")
    path = folder.absolute() / "replay.png"
    figure.savefig(path, dpi=110)
    return path
