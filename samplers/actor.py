"""The Ray actor that hosts one sampler; a thin shell, so that everything below it runs and is tested without Ray."""

import os
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np

from rlq.publish import PackedSnapshot, unpack
from rlq.schemes import Scheme
from rlq.types import InstallReport, Request, Rollout, Sampler, Sampling


class SamplerActor:
    """Builds its sampler from a picklable factory and forwards calls.

    Args:
        factory: called with `args` in the actor's process.
        args: picklable arguments.
        scheme: passed to the factory beside them.
    """

    def __init__(self, factory: Callable[..., Sampler], args: tuple, scheme: Scheme):
        self.sampler = factory(*args, scheme=scheme)

    def where(self) -> tuple[str, int]:
        """Host name and process id, for messages and for the tests that kill it."""
        return socket.gethostname(), os.getpid()

    def install(self, packed: PackedSnapshot) -> InstallReport:
        """Install a snapshot that lies in shared memory."""
        return self.sampler.install(unpack(packed))

    def update(self, blob: np.ndarray) -> InstallReport:
        """Install a delta that lies in shared memory; see `rlq.delta`."""
        return self.sampler.update(blob.tobytes())  # type: ignore[attr-defined]  # engines have it, pools do not

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> tuple[list[Rollout], float]:
        """Sample; returns the rollouts and the seconds spent."""
        start = time.perf_counter()
        return self.sampler.generate(requests, sampling, version), time.perf_counter() - start
