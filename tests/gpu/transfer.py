#!/usr/bin/env python3
"""Bytes from this process to sampler processes through vLLM's transfer engines; needs vLLM and Ray.

    python3 tests/gpu/transfer.py ipc 1     # to one process on this GPU
    python3 tests/gpu/transfer.py nccl 1    # to one process on another GPU
    python3 tests/gpu/transfer.py store 2   # on a CPU, to exercise this script

Sends several versions and compares what arrived; the last line is JSON: whether all did, and bytes per second.
"""

import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT), str(ROOT / "tests/support")]
sys.path[:0] = PATHS
os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
import torch

from samplers.pool.actor import SHIP, SamplerActor
from samplers.transport.gpu import VllmTransfer

SIZES = {"cpu": (3 << 20, 1), "cuda": (1 << 30, 777)}


class Sink(SamplerActor):
    """A sampler without an engine."""

    def __init__(self, paths: list[str], backend: str):
        self.endpoint = None
        sys.path[:0] = paths
        if backend == "store":
            importlib.import_module("store_backend").register()

    def digest(self, nbytes: int) -> str:
        """Hash of what arrived."""
        return hashlib.sha256(self.endpoint.take(nbytes).cpu().numpy().data).hexdigest()


def main(backend: str, count: int) -> dict:
    """Send, compare, and say how fast."""
    device = "cpu" if backend == "store" else "cuda"
    if backend == "store":
        importlib.import_module("store_backend").register()
    environment = {"PYTHONPATH": os.pathsep.join(PATHS)}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    if device == "cuda":
        torch.cuda.set_device(0)
    remote: Any = ray.remote(concurrency_groups={SHIP: 1})  # type: ignore[call-overload]  # Ray documents it
    sinks = []
    for i in range(count):
        # The learner's GPU is not Ray's to hand out here: it is chosen by name.
        chosen = {"CUDA_VISIBLE_DEVICES": str(0 if backend == "ipc" else i + 1)} if device == "cuda" else {}
        options = {"num_cpus": 0, "runtime_env": {"env_vars": environment | chosen}}
        sinks.append(remote(Sink).options(**options).remote(PATHS, backend))
    way, equal, rates = VllmTransfer(backend), True, []
    for version, size in enumerate((*SIZES[device], *SIZES[device])):
        payload = os.urandom(min(size, 1 << 20)) * -(-size // (1 << 20))
        start = time.perf_counter()
        way.send(version, payload, sinks)
        rates.append(len(payload) / (time.perf_counter() - start))
        wanted = hashlib.sha256(payload).hexdigest()
        equal &= ray.get([sink.digest.remote(len(payload)) for sink in sinks]) == [wanted] * count
    way.close()
    ray.shutdown()
    return {"equal": equal, "bytes_per_s": max(rates)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
