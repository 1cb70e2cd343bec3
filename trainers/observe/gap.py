"""Gap attribution: which part of the sampler's distance is quantization, which the engine, which staleness."""

import torch

from rlq.bridge import gap_attribution
from rlq.emulate.model import load_snapshot
from rlq.formats.schemes import Scheme

from ..publish.publisher import collect
from ..twin import empty_twin, score
from ..view import Learner
from .batch import ScoredBatch


def quantized_copy(learner: Learner, scheme: Scheme) -> torch.nn.Module:
    """Copy the learner's model and make it compute what a sampler of `scheme` computes with its present weights."""
    model = empty_twin(learner.policy.config, scheme)
    load_snapshot(model, collect(learner, scheme).quantize())
    return model.to(learner.policy.device)


class GapAttribution:
    """Scores a batch with a quantized copy when it is sampled, and with the learner when it is learned from.

    The second is as late as that, so that staleness is what the loss sees.

    Args:
        learner: whose batches.
    """

    def __init__(self, learner: Learner):
        self.learner = learner
        self._scored: tuple[ScoredBatch, torch.Tensor] | None = None

    def scored(self, batch: ScoredBatch, scheme: Scheme) -> None:
        """Score the batch under the weights that sampled it."""
        model = quantized_copy(self.learner, scheme)
        self._scored = batch, score(model, batch.out, self.learner.args.temperature)[0]

    def learned(self) -> None:
        """Log the attribution of the batch that was scored last, once."""
        if self._scored is None:
            return
        (batch, quantized), self._scored = self._scored, None
        now, _ = score(self.learner.model, batch.out, self.learner.args.temperature)
        gap = gap_attribution(now, batch.learner, quantized, batch.sampler, batch.mask, reduce=self.learner.reducer)
        self.learner.log_rlq(gap.metrics())
