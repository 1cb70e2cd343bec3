"""`curves.png`: reward, sampler KL, clip fractions and lag of one run, or of several for comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("reward", "mean reward", ("reward",), "linear"),
    ("sampler KL (k3)", "nats per token", ("rlq/sampler_kl_k3",), "log"),
    (
        "clipped or dropped",
        "fraction of tokens",
        ("rlq/clip_frac_high", "rlq/clip_frac_low", "rlq/mask_frac", "rlq/veto_seq_frac"),
        "linear",
    ),
    ("effective sample size", "fraction", ("rlq/ess_token", "rlq/ess_seq"), "linear"),
    ("version lag", "optimizer steps", ("rlq/sync/version_lag",), "linear"),
    ("step time", "seconds", ("step_time", "rlq/time/generate_s", "rlq/sync/install_s"), "log"),
)
"""Title, unit of the y axis, metrics, scale of the y axis."""


def plot_curves(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Draw `PANELS` for each run (label to records of metrics.jsonl) into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
    for axis, (title, unit, metrics, scale) in zip(axes.flat, PANELS, strict=True):
        for run, records in runs.items():
            for metric in metrics:
                points = [(r["step"], r[metric]) for r in records if r.get(metric) is not None]
                if not points or (scale == "log" and max(y for _, y in points) <= 0):
                    continue
                label = " ".join(
                    part for part in (run if len(runs) > 1 else "", metric if len(metrics) > 1 else "") if part
                )
                axis.plot(*zip(*points, strict=True), label=label or None, linewidth=1.3)
        axis.set(title=title, ylabel=unit, xlabel="step", yscale=scale)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
