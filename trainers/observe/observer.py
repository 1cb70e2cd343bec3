"""What a run looks at besides training: dumps, breakdowns, shadow corrections, gap attribution and the guard.

Everything here reads the batch that the score seam has just corrected; nothing changes it. Only the guard acts, on what
comes after: the correction, the samplers' scheme, or the end of the run.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback

from rlq.errors import ConfigError
from rlq.formats.schemes import Scheme

from ..view import Learner
from .batch import RewardTap, ScoredBatch
from .config import ObserveConfig
from .gap import GapAttribution
from .guard_actions import GuardActions
from .shadows import Shadows
from .tables import write_breakdown, write_dump


class Observer(TrainerCallback):
    """Hands every scored batch to what is due.

    Args:
        learner: whose batches.
        config: what to look at, and how often.
        scheme: what the samplers serve at first.
        run_dir: where tables and dumps go.
        taps: the reward functions.

    Raises:
        ConfigError: settings that cannot be served.
    """

    def __init__(
        self, learner: Learner, config: ObserveConfig, scheme: Scheme, run_dir: Path, taps: Sequence[RewardTap]
    ):
        if config.gap_every and learner.args.async_steps:
            raise ConfigError(
                "gap_every needs the learner at the sampled version, which is gone with async_steps; set 0"
            )
        self.learner, self.config, self.run_dir, self.taps = learner, config, run_dir, taps
        self.shadows = Shadows(learner, config)
        self.gap = GapAttribution(learner)
        self.guard = GuardActions(learner, config.rules(), scheme, run_dir)

    @property
    def stopped(self) -> str | None:
        """Why the guard ended the run; None if it did not."""
        return self.guard.stopped

    def scored(self, batch: ScoredBatch) -> None:
        """Called by the score seam in training."""
        config, scheme = self.config, self.guard.scheme
        few = batch.first(config.observe_sequences)
        if self.shadows.corrections and self._due(config.shadow_every):
            self.shadows.evaluate(few)
        if self._due(config.breakdown_every):
            write_breakdown(self.learner, batch, self.taps, self.run_dir)
        if self._due(config.dump_every):
            write_dump(self.learner, batch, self.taps, scheme.name, self.run_dir)
        if self._due(config.gap_every):
            self.gap.scored(few, scheme)
        if config.guard != "off":
            self.guard.step(batch.bridge.metrics)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Attribute the gap where the learner stands when it learns."""
        self.gap.learned()

    def on_step_end(self, args, state, control, **kwargs):
        """Carry out a stop: save, then end."""
        if self.stopped:
            control.should_save = control.should_training_stop = True
        return control

    def _due(self, every: int) -> bool:
        return every > 0 and self.learner.version % every == 0
