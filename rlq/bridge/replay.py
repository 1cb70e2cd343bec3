"""Corrections recomputed on dumped rollouts, batch by batch, and compared."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import ConfigError
from .correct import correct_all
from .correction.correction import Correction
from .diagnostics.shadow import coefficients
from .dump import Rollouts
from .metrics.sums import BridgeSums


@dataclass
class Replay:
    """Corrections compared over a dump, batch by batch."""

    corrections: dict[str, Correction]
    """Name to correction; the first is the reference of the cosine."""
    sums: dict[str, BridgeSums] = field(default_factory=dict)
    """Name to the merged summary of all batches so far."""
    history: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Name to the metrics of each batch."""
    gram: Tensor | None = None
    """(K, K) inner products of the coefficients w_t A_t, where the dump has advantages."""

    def add(self, rollouts: Rollouts, learner: str | None = None) -> None:
        """Add a batch. Statistics over a batch (normalization, ESS target) are taken over this one."""
        outputs = correct_all(
            rollouts.learner(learner),
            rollouts.sampler_logprobs,
            rollouts.mask,
            self.corrections,
            advantages=rollouts.advantage,
        )
        for name, out in outputs.items():
            self.sums[name] = out.sums.merge(self.sums[name]) if name in self.sums else out.sums
            self.history.setdefault(name, []).append(out.metrics)
        if rollouts.advantage is not None:
            each = coefficients(list(outputs.values()), rollouts.advantage, [1.0] * len(outputs))
            gram = each @ each.T
            self.gram = gram if self.gram is None else self.gram + gram

    def report(self) -> dict[str, dict[str, float]]:
        """Name to metrics over the whole dump, with `cosine` to the first correction where advantages are known."""
        report = {name: sums.metrics() for name, sums in self.sums.items()}
        if self.gram is not None:
            norms = self.gram.diagonal().sqrt()
            for k, name in enumerate(self.corrections):
                both = float(norms[0] * norms[k])
                report[name]["cosine"] = float(self.gram[0, k]) / both if both else 0.0
        return report


def replay(batches: Iterable[Rollouts], corrections: dict[str, Correction], *, learner: str | None = None) -> Replay:
    """Compare corrections over batches of rollouts.

    Args:
        batches: what `read_rollouts` yields.
        corrections: name to correction.
        learner: `old_logprobs` or `logprobs`; None takes the first of them that the dump has.

    Raises:
        ConfigError: no batch, or one that `correct` refuses.
    """
    result = Replay(corrections)
    for rollouts in batches:
        result.add(rollouts, learner)
    if not result.sums:
        raise ConfigError("the dump holds no completion: nothing to replay")
    return result
