"""The trainer callback that records and shows each step, and the closing table."""

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rlq.metrics import METRICS

from . import records
from .progress import Progress


class RunRecorder(TrainerCallback):
    """Writes metrics.jsonl and feeds the progress display.

    Args:
        run_dir: absolute run directory.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / records.FILE
        self.progress: Progress | None = None
        self.step_ended = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the display; after a resume, drop what is about to be written again."""
        if state.is_world_process_zero:
            records.truncate_after(self.path, state.global_step)
            self.progress = Progress(state.max_steps, state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        """The optimizer has stepped; what follows until the record is written is tracking."""
        self.step_ended = time.perf_counter()

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        """Record and show."""
        if self.progress is None or logs is None or "train_runtime" in logs:
            return
        record = {"step": state.global_step, "time": round(time.time(), 3), **logs}
        if "loss" in logs:
            self.progress.update(state.global_step, record)
            record["rlq/time/track_s"] = time.perf_counter() - self.step_ended
        records.append(self.path, record)

    def on_train_end(self, args, state, control, **kwargs):
        """Close the display."""
        if self.progress is not None:
            self.progress.close()


SUMMARY_ROWS = tuple((label, key) for (_, label), key in sorted((m.row, m.key) for m in METRICS.values() if m.row))
"""Label and metric of each row of the closing table."""

WINDOW = 5  # steps averaged at either end


def summary_table(history: list[dict[str, Any]]):
    """First and last `WINDOW` logged steps side by side, as a rich table."""
    from rich.table import Table

    table = Table(title=f"{len(history)} logged steps", show_edge=False)
    for heading in ("mean of", f"first {WINDOW}", f"last {WINDOW}"):
        table.add_column(heading, justify="left" if heading == "mean of" else "right")
    for label, metric in SUMMARY_ROWS:
        first, last = (_mean(rows, metric) for rows in (history[:WINDOW], history[-WINDOW:]))
        if last is not None:
            table.add_row(label, _text(first), _text(last))
    return table


def _mean(rows: list[dict[str, Any]], metric: str) -> float | None:
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return sum(values) / len(values) if values else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
