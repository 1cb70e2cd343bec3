"""Follows `ray job submit`: one live progress bar on a terminal, plain lines elsewhere, the job's own lines in between.

A job that wants a bar prints, when RLQ_PROGRESS=json is in its environment, one line per training step:

    rlq-step {"step": 12, "max_steps": 60, "reward": 0.71, "rlq/sampler_kl_k3": 0.0005, "eta_s": 61}

and `run_dir=/absolute/path` as its last line. Every other line is passed through as it is.
"""

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

STEP_PREFIX = "rlq-step "
RUN_DIR_PREFIX = "run_dir="
# key of the step line, label, how it is shown
SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward", "{:.3f}".format),
    ("rlq/sampler_kl_k3", "k3", "{:.1e}".format),
    ("rlq/clip_frac_high", "clip", "{:.2%}".format),
    ("rlq/rollout/tokens_per_s", "tok/s", "{:,.0f}".format),
    ("eta_s", "eta", lambda seconds: f"{int(seconds) // 60}:{int(seconds) % 60:02d}"),
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RAY_LOG = re.compile(r"^(?:[\d-]+ [\d:,]+\s+[A-Z]+ \w+\.py:\d+ -- )?(.*)$")
_RULE = re.compile(r"^-*$")
_RAY_CHATTER = ("Runtime env is setting up.", "Running entrypoint for job ", "WebSocket closed for job ")


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
    before: list[str] = field(default_factory=list)
    """What `ray job submit` said before the job's log began: of interest only when it failed."""
    after: list[str] = field(default_factory=list)
    """What it said after the log ended."""

    @property
    def job_spoke(self) -> bool:
        """True when the job itself printed anything."""
        return self.started_s is not None


def follow(lines: Iterable[str], job: str, console: Console, seen: Followed) -> None:
    """Shows the output of `ray job submit` for submission id `job` until it ends, and notes in `seen` what it saw."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("submitting", total=None, numbers="")
        for line in _job_lines(lines, job, seen):
            step = _step(line)
            if step is None:
                progress.update(task, description="starting" if seen.first_step_s is None else "training")
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


def _step(line: str) -> dict[str, Any] | None:
    """The object of a step line; None for every other line, a damaged step line included."""
    if not line.startswith(STEP_PREFIX):
        return None
    try:
        step = json.loads(line.removeprefix(STEP_PREFIX))
    except json.JSONDecodeError:
        return None
    return step if isinstance(step, dict) and "step" in step else None


def _job_lines(lines: Iterable[str], job: str, seen: Followed) -> Iterable[str]:
    """The job's own lines, without what `ray job submit` wraps around them."""
    source = (line.rstrip("\n") for line in lines)
    for line in source:
        seen.before.append(line)
        if "Tailing logs until the job exits" in line:
            break
    closing = re.compile(
        rf"^(?:Job '{re.escape(job)}' (?:succeeded|failed|was stopped)|Status for job '{re.escape(job)}')"
    )
    rules: list[str] = []  # lines of dashes, held back until it is known whether the closing message follows them
    for line in source:
        text = _RAY_LOG.sub(r"\1", _ANSI.sub("", line))
        if closing.match(text):
            break
        if text.startswith(_RAY_CHATTER):
            continue
        if _RULE.match(text):
            rules.append(line)
            continue
        seen.started_s = seen.started_s or time.monotonic()
        yield from rules
        rules.clear()
        yield line
    seen.after.extend(source)
