"""Publishing: time to install on two actors, and memory of learner and actors over 200 publishes."""

import os

os.environ.setdefault("RAY_worker_niceness", "0")

import statistics
from pathlib import Path
from typing import Any

import ray
import torch
from support.common import MODEL, report, row, seconds
from transformers import AutoConfig, AutoModelForCausalLM

from rlq.publish import snapshot
from samplers.options import SamplerConfig
from samplers.pool.pool import SamplerPool

PUBLISHES = 200


def resident_mib(pid: int) -> float:
    """Private resident memory of a process in MiB: what the shared object store maps is not counted."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[key].split()[0]) for key in ("Private_Clean", "Private_Dirty")) / 1024


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = SamplerConfig(sampler_scheme="fp8", num_samplers=2, sampler_max_model_len=32)
    pool = SamplerPool.vllm(AutoConfig.from_pretrained(MODEL).to_dict(), config)
    pids = {"learner": os.getpid()}
    memory: dict[int, dict[str, float]] = {}
    installs, quantizes = [], []
    for version in range(1, PUBLISHES + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        snaps = []
        quantizes.append(
            seconds(lambda v=version, s=snaps: s.append(snapshot(model.named_parameters(), pool.scheme, v)))
        )
        installs.append(seconds(lambda s=snaps: pool.install(s[0])))
        if version in (5, PUBLISHES):
            for member in pool.fleet.members:
                place: Any = ray.get(member.actor.where.remote())
                pids[f"actor {member.index}"] = place.pid
            memory[version] = {name: resident_mib(pid) for name, pid in pids.items()}
    install = statistics.median(installs[5:])
    rows = [
        row("install of a version on both actors, ship included, ms", 1e3 * install, "<= 150", install <= 0.150),
        row("quantize, digest and check a version, ms", 1e3 * statistics.median(quantizes[5:])),
    ]
    for name in pids:
        growth = memory[PUBLISHES][name] / memory[5][name] - 1
        rows.append(
            row(f"memory of {name} after publish {PUBLISHES} over publish 5, %", 100 * growth, "<= 3", growth <= 0.03)
        )
    report("sync", rows)
    pool.close()


if __name__ == "__main__":
    main()
