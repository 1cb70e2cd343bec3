"""Shows a running job: one progress bar on a terminal, plain lines elsewhere, the job's own lines in between."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rlq import progress_line
from rlq.metrics import METRICS

RUN_DIR_PREFIX = "run_dir="
# key of the step line, label, how it is shown
SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    *((m.key, m.progress[0], f"{{:{m.progress[1]}}}".format) for m in METRICS.values() if m.progress),
    ("eta_s", "eta", lambda seconds: f"{int(seconds) // 60}:{int(seconds) % 60:02d}"),
)
# Ray writes these into the job's log before the job does.
RAY_LINES = ("Runtime env is setting up.", "Running entrypoint for job ")


@dataclass
class Followed:
    """What was seen of the job."""

    run_dir: str | None = None
    """From the job's last line."""
    started_s: float | None = None
    """time.monotonic() at the job's first line."""
    first_step_s: float | None = None
    """time.monotonic() at the first step line."""
    last_step: dict[str, Any] = field(default_factory=dict)
    """The newest step line."""


def follow(lines: Iterable[str], console: Console, seen: Followed) -> None:
    """Show a job's log until it ends, and note in `seen` what it said."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None, numbers="")
        for line in lines:
            if any(text in line for text in RAY_LINES) and seen.started_s is None:
                continue
            seen.started_s = seen.started_s or time.monotonic()
            step = progress_line.read(line)
            if step is None:
                _pass_through(line, seen, progress.console)
                continue
            seen.first_step_s = seen.first_step_s or time.monotonic()
            seen.last_step = step
            numbers = "  ".join(f"{label} {show(step[key])}" for key, label, show in SHOWN if step.get(key) is not None)
            progress.update(
                task, description="training", completed=step["step"], total=step.get("max_steps"), numbers=numbers
            )
            if not console.is_terminal:
                print(f"step {step['step']}/{step.get('max_steps', '?')}  {numbers}", flush=True)


def _pass_through(line: str, seen: Followed, console: Console) -> None:
    if line.startswith(RUN_DIR_PREFIX):
        seen.run_dir = line.removeprefix(RUN_DIR_PREFIX)
    elif console.is_terminal:
        console.out(line, highlight=False)
    else:
        print(line, flush=True)
