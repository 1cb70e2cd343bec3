"""The canary's reference: fixed prompts of the training set, scored by the learner as it was published."""

from itertools import islice
from typing import TYPE_CHECKING, Any

from rlq.canary import Probe, teacher_forced
from rlq.emulate import load_snapshot
from rlq.publish import Snapshot
from rlq.schemes import Scheme

from .quantized_learner import empty_twin

if TYPE_CHECKING:
    from .grpo import QuantGRPOTrainer

LONGEST = 64
"""Tokens of a prompt that are scored."""


class Canary:
    """Scores `canary_prompts` prompts with a dequantized copy of every published version.

    Args:
        trainer: whose prompts, settings and model these are; the copy lives on the CPU, in fp32.
    """

    def __init__(self, trainer: "QuantGRPOTrainer"):
        self.trainer = trainer
        self._prompts: tuple[tuple[int, ...], ...] = ()
        self._twin: tuple[Scheme, Any] | None = None

    def probe(self, snap: Snapshot) -> Probe | None:
        """What an engine that serves `snap` has to answer; None if nobody asked for it.

        Also None for schemes that round keys and values, which the copy does not, and for prompts of one token, which
        leave nothing to score.
        """
        args = self.trainer.args
        if not args.canary_prompts or snap.scheme.kv_cache is not None:
            return None
        if self._twin is None or self._twin[0] != snap.scheme:
            model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
            self._twin = snap.scheme, empty_twin(model.config, snap.scheme)
        if not self._prompts:
            dataset: Any = self.trainer.train_dataset
            rows = [row["prompt"] for row in islice(iter(dataset), args.canary_prompts)]
            ids = self.trainer._tokenize_prompts(rows)[0]
            self._prompts = tuple(tuple(prompt[:LONGEST]) for prompt in ids if len(prompt) > 1)
        if not self._prompts:
            return None
        twin = self._twin[1]
        load_snapshot(twin, snap)
        return Probe(self._prompts, tuple(teacher_forced(twin, self._prompts)), args.canary_tolerance)
