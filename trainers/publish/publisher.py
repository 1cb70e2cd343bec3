"""From the learner's weights to installed versions: calibrate, quantize, ship, score the canary, install."""

import time
from dataclasses import dataclass

import torch

from rlq.emulate.probe import ScoreCheck
from rlq.errors import SamplerError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, snapshot
from rlq.recipes.statistics import Statistics
from rlq.types import Sampler

from ..ranks import on_main
from ..view import Learner
from .calibration import calibrate
from .canary import Canary
from .gather import full_weights


@dataclass(frozen=True)
class Weights:
    """What a version is made from."""

    version: int
    """Optimizer steps behind it."""
    scheme: Scheme
    """How it is quantized."""
    named: list[tuple[str, torch.Tensor]]
    """The learner's full weights, complete on rank 0."""
    statistics: Statistics | None
    """What the scheme and its recipes read besides."""
    calibrate_s: float
    """Seconds spent on that."""

    def quantize(self) -> Snapshot:
        """Make the version."""
        return snapshot(self.named, self.scheme, self.version, self.statistics)


def collect(learner: Learner, scheme: Scheme) -> Weights:
    """Gather the learner's weights as they are and the statistics that `scheme` asks for; all ranks enter."""
    start = time.perf_counter()
    statistics = calibrate(learner, scheme)
    calibrate_s = time.perf_counter() - start
    return Weights(learner.version, scheme, full_weights(learner), statistics, calibrate_s)


@dataclass(frozen=True)
class Shipped:
    """A version on its way."""

    snap: Snapshot
    """Its quantized weights."""
    quantize_s: float
    """Seconds spent making it."""


class Publisher:
    """Makes versions and brings them to the samplers.

    All ranks enter `collect`; the rest happens on rank 0, which owns the samplers. `install` may run on another thread
    than the learner's, all else runs on that one, while the learner's weights stand still.

    Args:
        learner: whose weights, settings and prompts these are.
        samplers: an engine or a pool; None on ranks other than 0.
    """

    def __init__(self, learner: Learner, samplers: Sampler | None):
        self.learner = learner
        self.samplers = samplers
        self.canary = Canary(learner)

    def collect(self) -> Weights:
        """Gather the learner's weights and the statistics that the samplers' scheme asks for."""
        weights = collect(self.learner, on_main(self.learner.accelerator, lambda: self._served.scheme))
        if weights.statistics is not None:
            self.learner.log_rlq({"time/calibrate_s": weights.calibrate_s})
        return weights

    def ship(self, weights: Weights) -> Shipped:
        """Quantize, and send the version on its way."""
        start = time.perf_counter()
        snap = weights.quantize()
        quantize_s = time.perf_counter() - start
        self._served.ship(snap)  # beside the canary, and beside what is being sampled
        return Shipped(snap, quantize_s)

    def install(self, shipped: Shipped, probe: ScoreCheck | None) -> dict[str, float]:
        """Let the samplers switch to the version.

        Returns:
            Metrics of the publish.

        Raises:
            SamplerError: they installed something else.
        """
        snap = shipped.snap
        report = self._served.install(snap, probe)
        if report.digest != snap.digest:
            raise SamplerError(
                f"version {snap.version} was published as {snap.digest[:12]} and installed as {report.digest[:12]}"
            )
        return {
            "sync/bytes": float(snap.nbytes),
            "sync/shipped_bytes": float(report.shipped_bytes),
            "sync/tensors": float(report.num_tensors),
            "sync/quantize_s": shipped.quantize_s,
            "sync/ship_s": report.ship_s,
            "sync/install_s": report.install_s,
            "sync/pause_s": report.pause_s,
        }

    @property
    def _served(self) -> Sampler:
        assert self.samplers is not None, "rank 0 has samplers"
        return self.samplers
