"""An engine without a model: scripted tokens and faults, for tests of order, versions and failures."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rlq.errors import SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, TensorSpec, check_specs, tensor_digest
from rlq.publish.delta import Delta
from rlq.types import InstallReport, Request, Rollout, Sampling


@dataclass(frozen=True)
class Script:
    """What a `ScriptedSampler` does."""

    specs: dict[str, TensorSpec]
    """Tensors that it expects."""
    fault: str | None = None
    """`die` (kill the own process), `hang`, `corrupt` (flip a stored bit) or `miscompute` (score wrongly)."""
    phase: str | None = None
    """Call in whose middle it happens: `start`, `stage`, `install`, `digest`, `score` or `generate`."""
    on_version: int = 0
    """Version at which it happens; 0 for the start."""
    once: str | None = None
    """Path of a marker file: it happens only as long as that does not exist, and creates it; None: every time."""
    hang_s: float = 3600.0
    """Seconds that a hang takes."""
    call_s: float = 0.0
    """Seconds that a generate call takes."""


class ScriptedEngine:
    """Answers with tokens that name their seed and version, so that a test can tell who sampled what."""

    runs = "scripted"

    def __init__(self, script: Script, scheme: Scheme):
        self.script, self.scheme = script, scheme
        self.version: int | None = None
        self.served: Snapshot | None = None
        self.interrupted: int | None = None
        self._act("start", 0)

    def _strikes(self, phase: str, version: int) -> bool:
        """True if the script's fault happens now."""
        if (self.script.phase, self.script.on_version) != (phase, version):
            return False
        if self.script.once is None:
            return True
        try:
            Path(self.script.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _act(self, phase: str, version: int) -> None:
        if not self._strikes(phase, version):
            return
        if self.script.fault == "die":
            os._exit(9)
        elif self.script.fault == "hang":
            time.sleep(self.script.hang_s)
        elif self.script.fault == "corrupt":
            assert self.served is not None
            tensors = {name: tensor.clone() for name, tensor in self.served.tensors.items()}  # those are shared memory
            next(iter(tensors.values())).view(torch.uint8).view(-1)[0] ^= 1
            self.served = replace(self.served, tensors=tensors)

    def stage(self, version: Snapshot | Delta) -> Snapshot:
        """Check like an engine does; applies a delta to the version that is served."""
        if isinstance(version, Delta):
            if self.served is None:
                raise SnapshotError("a delta has no base here; send it whole")
            version = version.apply(self.served)
        if version.scheme != self.scheme:
            raise SnapshotError(f"snapshot is '{version.scheme}', this sampler serves '{self.scheme}'")
        check_specs(version.specs, self.script.specs)
        self._act("stage", version.version)
        return version

    def commit(self, staged: Snapshot) -> InstallReport:
        """Remember the version."""
        self.version = self.interrupted = None
        self._act("install", staged.version)
        self.version, self.served = staged.version, staged
        return InstallReport(staged.version, staged.digest, len(staged.tensors), ship_s=0.0, install_s=0.0, pause_s=0.0)

    def digest(self) -> str:
        """What is served, unless the script says that it went wrong."""
        assert self.served is not None
        self._act("digest", self.served.version)
        return tensor_digest(self.served.tensors)

    def score(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """-1 per token, and one more for a version that went wrong."""
        assert self.version is not None
        off = self.script.fault == "miscompute" and self._strikes("score", self.version)
        return [(-2.0 if off else -1.0,) * (len(prompt) - 1) for prompt in prompts]

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """One token per sample: `seed + i`."""
        if self.version != version:
            raise SamplerError(
                f"asked for version {version}, serving {self.version}; install the current snapshot first"
            )
        self._act("generate", version)
        rollouts = []
        for r in requests:
            if self.interrupted == version:
                break
            time.sleep(self.script.call_s / len(requests))
            for i in range(r.num_samples):
                token_ids, logprobs = np.array([r.seed + i]), np.array([-1.0], np.float32)
                sampled = (r.prompt_ids, token_ids, logprobs, "stop", version, self.scheme.name)
                rollouts.append(Rollout(*sampled, sampling.temperature, r.seed + i))
        return rollouts

    def close(self) -> None:
        """Nothing to end."""

    def interrupt(self, version: int) -> None:
        """Between two requests."""
        self.interrupted = version
