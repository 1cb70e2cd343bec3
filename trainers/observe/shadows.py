"""Shadow corrections: what other settings of the bridge would make of a batch, down to their gradients."""

import re

import torch

from rlq.bridge import shadow, shadow_metrics
from rlq.errors import ConfigError

from ..twin import differentiable_score
from ..view import Learner
from .batch import ScoredBatch
from .config import ObserveConfig


class Shadows:
    """Evaluates corrections beside the one that trains.

    Args:
        learner: whose batches and gradients.
        config: which corrections, and of which parameters the gradients are compared.

    Raises:
        ConfigError: the pattern matches no parameter.
    """

    def __init__(self, learner: Learner, config: ObserveConfig):
        self.learner, self.pattern = learner, config.shadow_parameters
        self.corrections = config.shadows()
        self._parameters()  # a pattern that matches nothing is refused now

    def evaluate(self, batch: ScoredBatch) -> None:
        """Log every correction's weights and gradient, compared with those of the correction that trains."""
        parameters = self._parameters()
        with torch.enable_grad():
            log_p, _ = differentiable_score(self.learner.model, batch.out, self.learner.args.temperature)

        def gradient(coefficients: torch.Tensor) -> torch.Tensor:
            parts = torch.autograd.grad(log_p, parameters, coefficients.to(log_p.dtype), retain_graph=True)
            return torch.cat([part.flatten() for part in parts])

        estimates = shadow(
            batch.learner,
            batch.sampler,
            batch.mask,
            self.corrections,
            active=self.learner.correction,
            advantages=batch.out["advantages"],
            gradient=gradient,
            reduce=self.learner.reducer,
        )
        self.learner.log_rlq(shadow_metrics(estimates))

    def _parameters(self) -> list[torch.nn.Parameter]:
        named = list(self.learner.policy.named_parameters())
        if self.pattern is None:
            return [parameter for _, parameter in named if parameter.ndim == 1][-1:]
        found = [parameter for name, parameter in named if re.search(self.pattern, name)]
        if not found:
            raise ConfigError(
                f"shadow_parameters {self.pattern!r} matches no parameter; names look like {named[-1][0]!r}"
            )
        return found
