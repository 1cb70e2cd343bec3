#!/usr/bin/env python3
"""Trains on this machine the way one trains on a cluster: Ray head, `ray job submit`, progress bar, clean-up.

    python launch/run.py                                                       # FP8 rollouts, what `make run` does
    python launch/run.py --script launch/grpo_bf16.py --config configs/grpo_bf16.yaml
    python launch/run.py -- --max_steps 10 --seed 3                            # flags for the launch script

A Ray that already runs (RAY_ADDRESS, or Ray's default address) is used and left running.
"""

import argparse
import asyncio
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console

from launch.follow import Followed, follow
from launch.ray_head import Ray, interpreter_folder, local_or_running_ray
from rlq import progress_line
from rlq.errors import RlqError

PACKAGE_LIMIT = 200_000_000
INTERRUPTED = 130
STOP_S = 60.0
"""Seconds that an interrupted job gets to write its checkpoint."""


class Clock:
    """Seconds per phase, in the order in which the phases ended."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()
        self.phases: list[str] = []

    def mark(self, phase: str, now: float | None = None) -> None:
        """Ends a phase, now or at a given time.monotonic()."""
        now = time.monotonic() if now is None else now
        self.phases.append(f"{phase} {now - self.last:.1f} s")
        self.last = now

    def summary(self) -> str:
        """All phases and the total on one line."""
        return ", ".join([*self.phases, f"total {time.monotonic() - self.start:.1f} s"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job and returns its exit code: 0, or 1 when it failed, 130 when interrupted."""
    args = _arguments(argv)
    os.chdir(ROOT)
    problem = package_problem(ROOT)
    if problem is not None:
        print(f"rlq: error: {problem}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    clock = Clock()
    job = f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    entrypoint, output_dir = _entrypoint(args, job)
    code, seen = INTERRUPTED, Followed()
    try:
        with local_or_running_ray() as ray:
            print(
                f"rlq: {'started a local' if ray.ours else 'using the running'} Ray at {ray.variables['RAY_ADDRESS']}",
                flush=True,
            )
            clock.mark("head ready")
            code = _run_job(ray, job, entrypoint, seen, clock)
        clock.mark("head stopped" if ray.ours else "head left running")
    except RlqError as error:
        print(f"rlq: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    verdict = {0: "done", INTERRUPTED: "interrupted"}.get(code, "the job failed, its last lines above say why")
    print(f"rlq: {verdict} ({clock.summary()})")
    if seen.run_dir is not None or output_dir.is_dir():
        print(f"run_dir={seen.run_dir or output_dir}")
    return code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/run.py",
        description="Submit a launch script to a local Ray and follow it.",
        epilog="Flags after -- go to the launch script.",
    )
    parser.add_argument("--script", type=Path, default=Path("launch/grpo_fp8.py"), help="default: %(default)s")
    parser.add_argument("--config", type=Path, default=Path("configs/grpo_fp8.yaml"), help="default: %(default)s")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="passed to the launch script as they are")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unknown flag {unknown[0]}; what is meant for the launch script goes after --")
    for name in ("script", "config"):
        path = getattr(args, name)
        if not (ROOT / path).is_file():
            parser.error(f"--{name} {path}: no such file in {ROOT}")
    return args


def _entrypoint(args: argparse.Namespace, job: str) -> tuple[list[str], Path]:
    """The job's command and its output directory: absolute, because relative to a job is a copy that Ray deletes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, default=Path("runs") / job)
    known, flags = parser.parse_known_args(args.flags)
    output_dir = ROOT / known.output_dir
    command = ["python", str(args.script), "--config", str(args.config), *flags, "--output_dir", str(output_dir)]
    return command, output_dir


def _run_job(ray: Ray, job: str, entrypoint: list[str], seen: Followed, clock: Clock) -> int:
    """Submit, follow into `seen`, and stop the job when this process is interrupted; returns the exit code."""
    variables = {progress_line.VARIABLE: progress_line.VALUE, "PYTHONUNBUFFERED": "1"}
    if ray.local and not ray.ours:
        variables["PATH"] = f"{interpreter_folder()}:${{PATH}}"  # a Ray of ours has this already
    _print_command(ray, job, entrypoint)
    os.environ.update(ray.variables)
    from ray.job_submission import JobStatus, JobSubmissionClient  # reads its environment when it is imported

    for name in ("job.sdk", "dashboard_sdk"):  # they announce that .git does not travel, and that a log ends
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.ERROR)

    try:
        client = JobSubmissionClient(ray.variables["RAY_ADDRESS"])
        client.submit_job(
            entrypoint=shlex.join(entrypoint),
            submission_id=job,
            runtime_env={"working_dir": str(ROOT), "env_vars": variables},
        )
    except (ConnectionError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise RlqError(f"the job could not be submitted to {ray.variables['RAY_ADDRESS']}: {first}") from None
    try:
        follow(job_lines(client, job), Console(), seen)
        code = 0 if client.get_job_status(job) == JobStatus.SUCCEEDED else 1
    except KeyboardInterrupt:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        print("rlq: stopping the job", flush=True)
        _stop_job(client, job)
        code = INTERRUPTED
    if code == 1 and seen.started_s is None:
        print(client.get_job_info(job).message)
    _mark(seen, clock)
    return code


def _print_command(ray: Ray, job: str, entrypoint: list[str]) -> None:
    """What a user would type for the same."""
    submit = ["ray", "job", "submit", "--working-dir", ".", "--submission-id", job, "--", *entrypoint]
    prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in ray.variables.items())
    print(f"rlq: {prefix} {shlex.join(submit)}", flush=True)


def job_lines(client: Any, job: str) -> Iterator[str]:
    """The lines of a job's log, as they come, until it ends; Ray sends pieces that end anywhere."""
    pieces = client.tail_job_logs(job)

    async def take() -> str | None:
        return await anext(pieces, None)

    begun = ""
    with asyncio.Runner() as runner:
        while (piece := runner.run(take())) is not None:
            *lines, begun = (begun + piece).split("\n")
            yield from lines
    if begun:
        yield begun


def _stop_job(client: Any, job: str) -> None:
    client.stop_job(job)
    deadline = time.monotonic() + STOP_S
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > deadline:
            print(f"rlq: the job has not stopped after {STOP_S:.0f} s; ask again with: ray job stop {job}")
            return
        time.sleep(0.5)


def _mark(seen: Followed, clock: Clock) -> None:
    if seen.started_s is not None:
        clock.mark("submit", seen.started_s)
    if seen.first_step_s is not None:
        clock.mark("first step", seen.first_step_s)
    clock.mark("job end")


def package_problem(root: Path) -> str | None:
    """Why the working directory must not be sent, or None; the files are those that Ray would package.

    Ray honours .gitignore, and nothing else of git's; outside a git checkout its own limit of 512 MiB has to do.
    """
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-per-directory=.gitignore"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        return None
    files = {root / name for name in listing.stdout.split("\0") if name}
    sizes = sorted(((path.stat().st_size, path) for path in files if path.is_file()), reverse=True)
    total = sum(size for size, _ in sizes)
    if total <= PACKAGE_LIMIT:
        return None
    largest = ", ".join(f"{path.relative_to(root)} {size / 1e6:.0f} MB" for size, path in sizes[:5])
    return (
        f"the working directory is {total / 1e6:.0f} MB, more than {PACKAGE_LIMIT / 1e6:.0f} MB would travel with the "
        f"job; move away or add to .gitignore: {largest}"
    )


if __name__ == "__main__":
    sys.exit(main())
