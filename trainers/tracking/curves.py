"""`curves.png`: reward, sampler KL, clip fractions and lag of one run, or of several for comparison."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlq import metrics

PANELS = tuple(
    (title, panel.unit, tuple(m.key for m in metrics.METRICS.values() if m.panel == title), panel.scale)
    for title, panel in metrics.PANELS.items()
)
"""Title, unit of the y axis, metrics, scale of the y axis."""


def plot_curves(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Draw `PANELS` into one PNG for each run: label to records of metrics.jsonl.

    Of several runs each panel shows its first metric, one colour per arm: the first word of the label, as in "fp8 0".
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
    for axis, (title, unit, shown, scale) in zip(axes.flat, PANELS, strict=True):
        for label, color, metric, records in _lines(runs, shown):
            points = [(r["step"], r[metric]) for r in records if r.get(metric) is not None]
            if points and not (scale == "log" and max(y for _, y in points) <= 0):
                axis.plot(*zip(*points, strict=True), label=label, color=color, linewidth=1.3, alpha=0.8)
        axis.set(title=title, ylabel=unit, xlabel="step", yscale=scale)
        if metrics.PANELS[title].from_zero:
            axis.set_ylim(bottom=0, top=max(axis.get_ylim()[1], 1e-3))
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(
    runs: Mapping[str, Sequence[dict[str, Any]]], shown: tuple[str, ...]
) -> Iterator[tuple[str | None, str | None, str, Sequence[dict[str, Any]]]]:
    """Label, colour, metric and records of each line of a panel."""
    if len(runs) == 1:
        ((_, records),) = runs.items()
        for metric in shown:
            yield metric if len(shown) > 1 else None, None, metric, records
        return
    arms: dict[str, str] = {}
    for run, records in runs.items():
        arm = run.split()[0]
        first = arm not in arms
        color = arms.setdefault(arm, f"C{len(arms)}")
        yield arm if first else None, color, shown[0], records
