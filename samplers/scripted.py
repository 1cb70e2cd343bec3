"""A sampler without a model: scripted tokens and faults, for tests of order, versions and failures."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlq.errors import SamplerError, SnapshotError
from rlq.publish import Snapshot, TensorSpec, check_specs
from rlq.schemes import Scheme
from rlq.types import InstallReport, Request, Rollout, Sampling


@dataclass(frozen=True)
class Script:
    """What a `ScriptedSampler` does."""

    specs: dict[str, TensorSpec]
    """Tensors that it expects."""
    die_in: str | None = None
    """`install` or `generate`: kill the own process in the middle of that call."""
    die_on_version: int = 0
    """Version at which it dies."""
    once: str | None = None
    """Path of a marker file: die only as long as it does not exist, and create it; None dies every time."""
    call_s: float = 0.0
    """Seconds that a generate call takes."""


class ScriptedSampler:
    """Answers with tokens that name their seed and version, so that a test can tell who sampled what."""

    def __init__(self, script: Script, scheme: Scheme):
        self.script, self.scheme = script, scheme
        self.version: int | None = None

    def _maybe_die(self, phase: str, version: int) -> None:
        if self.script.die_in != phase or self.script.die_on_version != version:
            return
        if self.script.once is not None:
            marker = Path(self.script.once)
            if marker.exists():
                return
            marker.touch()
        os._exit(9)

    def install(self, snap: Snapshot) -> InstallReport:
        """Check like an engine does, then remember the version."""
        if snap.scheme != self.scheme:
            raise SnapshotError(f"snapshot is {snap.scheme.name!r}, this sampler serves {self.scheme.name!r}")
        check_specs(snap.specs, self.script.specs)
        self.version = None
        self._maybe_die("install", snap.version)
        self.version = snap.version
        return InstallReport(snap.version, snap.digest, len(snap.tensors), ship_s=0.0, install_s=0.0, pause_s=0.0)

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """One token per sample: `seed + i`."""
        if self.version != version:
            raise SamplerError(
                f"asked for version {version}, serving {self.version}; install the current snapshot first"
            )
        time.sleep(self.script.call_s)
        self._maybe_die("generate", version)
        return [
            Rollout(
                r.prompt_ids,
                (r.seed + i,),
                (-1.0,),
                "stop",
                version,
                self.scheme.name,
                sampling.temperature,
                r.seed + i,
            )
            for r in requests
            for i in range(r.num_samples)
        ]

    def switch(self, scheme: Scheme) -> None:
        """Serve another scheme, and nothing until the next install."""
        self.scheme, self.version = scheme, None

    def close(self) -> None:
        """Nothing to release."""
