"""One line, or one bar, per step: reward, sampler KL, clip fraction, tokens per second."""

import os
import sys
import time
from typing import Any

from rich import progress

from rlq import progress_line
from rlq.metrics import METRICS

SHOWN = {m.key: m.progress[0] for m in METRICS.values() if m.progress}
"""Metric name to its label in the bar."""


class Progress:
    """A bar on a terminal, plain lines elsewhere, JSON lines for `launch/run.py` (RLQ_PROGRESS=json).

    Args:
        max_steps: steps of the run.
        start_step: steps already done, when resuming.
    """

    def __init__(self, max_steps: int, start_step: int = 0):
        self.max_steps = max_steps
        self.start_step, self.start = start_step, time.monotonic()
        self.json = os.environ.get(progress_line.VARIABLE) == progress_line.VALUE
        self.bar: progress.Progress | None = None
        if not self.json and sys.stdout.isatty():
            columns = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
            self.bar = progress.Progress("grpo", *columns, "{task.fields[shown]}")
            self.task = self.bar.add_task("grpo", total=max_steps, completed=start_step, shown="")
            self.bar.start()

    def update(self, step: int, record: dict[str, Any]) -> None:
        """Show one step."""
        values = {label: record[name] for name, label in SHOWN.items() if record.get(name) is not None}
        shown = "  ".join(f"{label} {value:.3g}" for label, value in values.items())
        if self.json:
            done = step - self.start_step
            eta = (time.monotonic() - self.start) / max(done, 1) * (self.max_steps - step)
            line = {"step": step, "max_steps": self.max_steps, "eta_s": round(eta)}
            line |= {name: record[name] for name in SHOWN if record.get(name) is not None}
            print(progress_line.write(line), flush=True)
        elif self.bar is not None:
            self.bar.update(self.task, completed=step, shown=shown)
        else:
            print(f"step {step}/{self.max_steps}  {shown}", flush=True)

    def close(self) -> None:
        """Leave the bar where it is."""
        if self.bar is not None:
            self.bar.stop()
