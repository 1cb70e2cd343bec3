#!/usr/bin/env python3
"""Trains on this machine the way one trains on a cluster: Ray head, `ray job submit`, progress bar, clean-up.

    python launch/run.py                                                       # FP8 rollouts, what `make run` does
    python launch/run.py --script launch/grpo_bf16.py --config configs/grpo_bf16.yaml
    python launch/run.py -- --max_steps 10 --seed 3                            # flags for the launch script

A Ray that already runs (RAY_ADDRESS, or Ray's default address) is used and left running.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console

from launch.follow import Followed, follow
from launch.ray_head import Ray, RayUnavailable, environment, interpreter_folder, local_or_running_ray

PACKAGE_LIMIT = 200_000_000
INTERRUPTED = 130


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
    except RayUnavailable as error:
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
    """Submits, follows into `seen`, and stops the job when this process is interrupted; returns the exit code."""
    variables = {"RLQ_PROGRESS": "json", "PYTHONUNBUFFERED": "1"}
    if ray.local and not ray.ours:
        variables["PATH"] = f"{interpreter_folder()}:${{PATH}}"  # a head of ours has this already
    env = environment(**ray.variables)
    submit = [
        *("ray", "job", "submit", "--working-dir", ".", "--submission-id", job),
        *("--runtime-env-json", json.dumps({"env_vars": variables}), "--", *entrypoint),
    ]
    prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in ray.variables.items())
    print(f"rlq: {prefix} {shlex.join(submit)}", flush=True)
    submitting = subprocess.Popen(
        [interpreter_folder() / "ray", *submit[1:]],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the job in order
    )
    assert submitting.stdout is not None
    try:
        follow(submitting.stdout, job, Console(), seen)
        code = 0 if submitting.wait() == 0 else 1
    except KeyboardInterrupt:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        print("rlq: stopping the job", flush=True)
        submitting.kill()  # first, so that it cannot submit after the stop
        submitting.wait()
        _stop_job(job, env)
        code = INTERRUPTED
    if code == 1 and not seen.job_spoke:
        print("\n".join(seen.before + seen.after))
    _mark(seen, clock)
    return code


def _stop_job(job: str, env: dict[str, str]) -> None:
    command = [str(interpreter_folder() / "ray"), "job", "stop", job]
    try:
        subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        print(f"rlq: the job has not stopped after 60 s; ask again with: ray job stop {job}")


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
