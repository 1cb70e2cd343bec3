"""Train with one correction, watch the others: what would each have made of this batch?

Axes: B sequences, T completion tokens (padded), K corrections, D gradient features.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError
from ..correct import BridgeOutput, correct_all
from ..correction.correction import Correction
from ..reduce import Reducer


@dataclass(frozen=True)
class ShadowEstimate:
    """One correction's view of a batch."""

    weight_mean: float
    """Mean applied weight over finite tokens, dropped ones as 0."""
    ess: float
    """Effective sample size of the applied weights, as a share of the tokens."""
    clip_frac: float
    """Share of tokens whose ratio lies beyond a bound."""
    kept_token_frac: float
    """Share of tokens that stay in the loss."""
    cosine: float
    """Between its policy-gradient estimate and that of the active correction; 0 where either is zero."""
    norm_ratio: float
    """Norm of its policy-gradient estimate over that of the active correction; 0 where the latter is zero."""


@torch.no_grad()
def shadow(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    corrections: Mapping[str, Correction],
    *,
    active: Correction,
    advantages: Tensor,
    features: Tensor | None = None,
    gradient: Callable[[Tensor], Tensor] | None = None,
    reduce: Reducer | None = None,
) -> dict[str, ShadowEstimate]:
    """Every named correction on the same batch, its gradient compared with that of the active one.

    A correction estimates the policy gradient as g = (1 / denominator) sum_t w_t A_t phi_t over its kept tokens, where
    phi_t is the gradient of log pi(y_t) with respect to some slice of the parameters: given as `features`, or summed
    by `gradient`. With neither they are taken as orthonormal: the cosine is then that of the coefficients w_t A_t.

    Args:
        learner_logprobs: (B, T).
        sampler_logprobs: (B, T).
        mask: (B, T) bool. Pass a slice of the batch to bound the cost.
        corrections: name to correction.
        active: the correction that trains.
        advantages: (B,) or (B, T).
        features: (B, T, D), phi_t; what lies outside the mask never matters.
        gradient: turns coefficients (B, T), fp64, 0 outside the mask, into sum_t c_t phi_t, (D,).
        reduce: combines sums over the ranks that share the batch.

    Raises:
        ConfigError: inputs that `correct` refuses, or shapes that do not match.
    """
    if features is not None and features.shape[:2] != mask.shape:
        raise ConfigError(f"features have shape {tuple(features.shape)}: pass (batch, tokens, features) for the mask")
    everything = {"": active} | dict(corrections)
    results = correct_all(learner_logprobs, sampler_logprobs, mask, everything, advantages=advantages, reduce=reduce)
    outputs = list(results.values())
    gram = _gram(outputs, advantages, features, gradient, reduce)
    norms = [math.sqrt(max(0.0, float(gram[k, k]))) for k in range(len(outputs))]
    estimates = {}
    for k, (name, out) in enumerate(zip(corrections, outputs[1:], strict=True), start=1):
        both = norms[0] * norms[k]
        m = out.metrics
        estimates[name] = ShadowEstimate(
            weight_mean=m.get("weight_mean", 0.0),
            ess=m.get("ess_applied", 0.0),
            clip_frac=m.get("clip_frac_high", 0.0) + m.get("clip_frac_low", 0.0),
            kept_token_frac=m.get("kept_token_frac", 0.0),
            cosine=float(gram[0, k]) / both if both else 0.0,
            norm_ratio=norms[k] / norms[0] if norms[0] else 0.0,
        )
    return estimates


def shadow_metrics(estimates: Mapping[str, ShadowEstimate]) -> dict[str, float]:
    """Flat names `shadow/<correction>/<quantity>`."""
    return {f"shadow/{name}/{field}": value for name, e in estimates.items() for field, value in vars(e).items()}


def coefficients(outputs: Sequence[BridgeOutput], advantages: Tensor, denominators: Sequence[float]) -> Tensor:
    """(K, N) fp64 w_t A_t / denominator of the N finite tokens under K corrections.

    Args:
        outputs: what `correct_all` made of one batch.
        advantages: (B,) or (B, T).
        denominators: one per correction; 1 where batches are added up.
    """
    finite = outputs[0].finite
    advantage = (advantages if advantages.ndim == 2 else advantages[:, None].expand_as(finite))[finite].double()
    weights = [out.weights[finite].double() / each for out, each in zip(outputs, denominators, strict=True)]
    return torch.stack(weights) * advantage


def _gram(
    outputs: list[BridgeOutput],
    advantages: Tensor,
    features: Tensor | None,
    gradient: Callable[[Tensor], Tensor] | None,
    reduce: Reducer | None,
) -> Tensor:
    """(K, K) fp64 inner products of the policy-gradient estimates."""
    finite = outputs[0].finite
    each = coefficients(outputs, advantages, [out.denominator for out in outputs])
    if features is None and gradient is None:
        gram = each @ each.T
        return gram if reduce is None else reduce.sum(gram.flatten()).view_as(gram)
    if gradient is not None:
        placed = each.new_zeros(len(outputs), *finite.shape)
        placed[:, finite] = each
        gradients = torch.stack([gradient(row).double() for row in placed])
    else:
        assert features is not None
        gradients = each @ features[finite].double()
    if reduce is not None:
        gradients = reduce.sum(gradients.flatten()).view_as(gradients)
    return gradients @ gradients.T
