"""Where the gap between learner and sampler comes from: staleness, quantization, or the engine.

The same tokens are scored four times, each score one step closer to the sampler::

    learner now -> learner at the sampled version -> that with quantized weights and activations -> the sampler
          staleness                    quantization                                engine

so the log ratio is a sum of three: ell = ell_stale + ell_quant + ell_engine.

Axes: B sequences, T completion tokens (padded).
"""

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from ..ratio import MAX_LOG_RATIO, MISSING_LOGPROB, check_inputs
from ..reduce import Reducer

PARTS = ("stale", "quant", "engine")


@dataclass(frozen=True)
class GapAttribution:
    """The three parts of E[ell] and of k3 = E[exp(ell) - 1 - ell]. Parts sum to their whole."""

    log_ratio: dict[str, float]
    """Part to its mean log ratio, signed; nats per token."""
    k3: dict[str, float]
    """Part to its share of k3, nats per token. A part can be negative where it undoes another."""
    tokens: int
    """Tokens with four finite scores, over all ranks."""

    @property
    def log_ratio_total(self) -> float:
        """E[ell], learner now minus sampler."""
        return sum(self.log_ratio.values())

    @property
    def k3_total(self) -> float:
        """k3 between sampler and learner now."""
        return sum(self.k3.values())

    def metrics(self) -> dict[str, float]:
        """`gap/<part>` for k3 and `gap/<part>_logratio` for E[ell]; nothing where no token could be scored."""
        if not self.tokens:
            return {}
        return {f"gap/{part}": self.k3[part] for part in PARTS} | {
            f"gap/{part}_logratio": self.log_ratio[part] for part in PARTS
        }


@torch.no_grad()
def gap_attribution(
    learner_logprobs: Tensor,
    old_logprobs: Tensor,
    quantized_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    reduce: Reducer | None = None,
) -> GapAttribution:
    """Split the mismatch into staleness, quantization and engine.

    E[ell] splits by linearity. k3 is not linear: its parts are Shapley values of the game whose value for a set of gaps
    is E[exp(s) - 1 - s] with s the sum of those gaps (Shapley 1953): the mean, over the six orders in which the gaps
    can be closed, of what closing one changes. They sum to k3 exactly and do not depend on an order.

    Args:
        learner_logprobs: (B, T), learner now.
        old_logprobs: (B, T), learner at the version that was sampled.
        quantized_logprobs: (B, T), that learner with the sampler's dequantized weights and activation rounding.
        sampler_logprobs: (B, T), the sampler.
        mask: (B, T) bool.
        reduce: combines sums over the ranks that share the batch.

    Raises:
        ConfigError: a score is missing or has another shape.
    """
    scores = (learner_logprobs, old_logprobs, quantized_logprobs, sampler_logprobs)
    for score in scores[:-1]:
        check_inputs(score, sampler_logprobs, mask)
    stacked = torch.stack([s.detach().double() for s in scores])
    finite = mask & (torch.isfinite(stacked) & (stacked > MISSING_LOGPROB)).all(0)
    now, old, quantized, sampler = stacked[:, finite].unbind(0)
    gaps = {"stale": now - old, "quant": old - quantized, "engine": quantized - sampler}
    k3 = _shapley(gaps)
    sums = torch.stack([finite.sum().double(), *(gaps[p].sum() for p in PARTS), *(k3[p] for p in PARTS)])
    count, *rest = (sums if reduce is None else reduce.sum(sums)).tolist()
    means = [x / count if count else 0.0 for x in rest]
    return GapAttribution(
        log_ratio=dict(zip(PARTS, means[:3], strict=True)),
        k3=dict(zip(PARTS, means[3:], strict=True)),
        tokens=int(count),
    )


def _shapley(gaps: dict[str, Tensor]) -> dict[str, Tensor]:
    """0-dim Shapley value of each gap for the sum over tokens of exp(s) - 1 - s."""
    values: dict[frozenset[str], Tensor] = {}

    def value(members: frozenset[str]) -> Tensor:
        if members not in values:
            s = torch.stack([gaps[m] for m in sorted(members)]).sum(0) if members else torch.zeros_like(gaps[PARTS[0]])
            values[members] = (torch.expm1(s.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - s).sum()
        return values[members]

    orders = list(permutations(PARTS))
    shares = {part: torch.zeros_like(value(frozenset())) for part in PARTS}
    for order in orders:
        for k, part in enumerate(order):
            shares[part] = shares[part] + value(frozenset(order[: k + 1])) - value(frozenset(order[:k]))
    return {part: share / len(orders) for part, share in shares.items()}
