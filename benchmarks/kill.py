"""The default job with a random sampler killed every 20 seconds, against the same job left alone.

Seeds decide what is sampled, not who samples it, so the two runs should not only look alike: every record of reward,
loss and token count should be the same.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from support.common import ROOT, report, row

SAME = ("step", "loss", "reward", "reward_std", "num_tokens", "completions/mean_length", "rlq/sampler_kl_k3")


def start(steps: int, directory: Path) -> subprocess.Popen:
    """The default job on a Ray of its own."""
    flags = {"max_steps": steps, "sampler_max_restarts": 10_000, "output_dir": directory, "report_to": "none"}
    command = [sys.executable, ROOT / "launch/grpo_fp8.py", *(f"--{name}={value}" for name, value in flags.items())]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(directory.parent / "stderr").open("ab"))


def samplers(run: subprocess.Popen) -> list[psutil.Process]:
    """Sampler processes of the run that live now."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::SamplerActor"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def records(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in SAME} for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    arguments = parser.parse_args()
    os.environ.update(RAY_worker_niceness="0", HF_HUB_OFFLINE="1")
    choose = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        seconds, kills, codes = {}, 0, {}
        for name in ("killed", "alone"):
            begun = time.monotonic()
            run = start(arguments.steps, Path(folder, name))
            try:
                while run.poll() is None:
                    time.sleep(arguments.every if name == "killed" else 0.5)
                    alive = samplers(run) if name == "killed" and Path(folder, name, "metrics.jsonl").exists() else []
                    if alive:
                        os.kill(choose.choice(alive).pid, signal.SIGKILL)
                        kills += 1
            finally:
                run.terminate()
            seconds[name], codes[name] = time.monotonic() - begun, run.returncode
        found = {name: records(Path(folder, name)) for name in seconds}
    same = sum(a == b for a, b in zip(found["killed"], found["alone"], strict=False))
    final = {name: sum(r["reward"] for r in each[-5:]) / 5 for name, each in found.items()}
    rows = [
        row("samplers killed", kills),
        row("minutes of the run with kills", seconds["killed"] / 60, ">= 10", seconds["killed"] >= 600),
        row("minutes of the run without", seconds["alone"] / 60),
        row("steps of the run with kills", len(found["killed"]), str(arguments.steps), codes["killed"] == 0),
        row("of which equal to the run without, bit for bit", same, str(arguments.steps), same == arguments.steps),
        row("reward, last 5 steps, with kills", final["killed"]),
        row("reward, last 5 steps, without", final["alone"]),
    ]
    report("kill", rows)


if __name__ == "__main__":
    main()
