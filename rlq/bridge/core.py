"""``correct``: from two log-probs and a mask to weights, the tokens that stay, and metrics.

Axes: B sequences, T completion tokens (padded).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .correction import Correction
from .metrics import Applied, BridgeSums, Reducer, sums_of
from .ratio import MAX_LOG_RATIO, LogRatio, log_ratio

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BridgeOutput:
    """What ``correct`` returns. Nothing here carries a gradient."""

    weights: Tensor
    """(B, T) fp32 (fp64 for fp64 inputs), detached; 0 outside ``keep``."""

    keep: Tensor
    """(B, T) bool, tokens that stay in the loss: the mask less non-finite, masked-out, rejected and vetoed tokens."""

    finite: Tensor
    """(B, T) bool, tokens of the mask with two finite log-probs; what a ``fixed`` denominator counts."""

    denominator: float
    """Tokens to divide the summed loss by: ``finite`` (fixed) or ``keep`` (kept), over all ranks when a reducer is given.
    At least 1, so that a batch that lost every token has loss 0 and gradient 0 rather than NaN."""

    log_ratio: Tensor
    """(B, T) learner minus sampler, bounded to +-``MAX_LOG_RATIO``, 0 outside ``finite``."""

    sums: BridgeSums
    """Additive summary of this rank's batch; ``merge`` it over micro-batches. Not yet reduced over ranks."""

    metrics: dict[str, float]
    """``METRIC_NAMES`` to values, over all ranks when a reducer is given."""


@torch.no_grad()
def correct(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    correction: Correction,
    *,
    reduce: Reducer | None = None,
) -> BridgeOutput:
    """Correction weights, kept tokens and metrics of one batch of rollouts.

    rho = exp(clamp(level(ell), +-20)) with ell = learner - sampler; see ``Correction`` for levels, modes and drops.
    Token truncation is TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training");
    the token mask is IcePop.

    Args:
        learner_logprobs: (B, T), any floating dtype; log-probs under the learner. A gradient it carries is ignored.
        sampler_logprobs: (B, T), any floating dtype; log-probs of the same ids under the distribution that sampled them.
        mask: (B, T) bool, True on completion tokens. What lies outside it never matters, NaN included.
        correction: what to do.
        reduce: combines sums over the ranks that share the batch; None means this is the whole batch.

    Raises:
        ConfigError: shapes, dtypes or a missing tensor, see ``check_inputs``.
    """
    ratio = log_ratio(learner_logprobs, sampler_logprobs, mask)
    applied = _apply(ratio, correction)
    sums = sums_of(ratio, learner_logprobs, sampler_logprobs, mask, applied)
    total = sums if reduce is None else sums.reduce(reduce)
    tokens, kept = total.value("tokens"), total.value("kept")
    if tokens and not kept:
        logger.warning("every token of the batch was dropped (kept_token_frac 0): its loss is 0; widen the bounds")
    return BridgeOutput(
        weights=applied.weights_BT,
        keep=applied.keep_BT,
        finite=ratio.finite_BT,
        denominator=max(1.0, tokens if correction.denominator == "fixed" else kept),
        log_ratio=ratio.bounded_BT,
        sums=sums,
        metrics=total.metrics(),
    )


def _apply(ratio: LogRatio, correction: Correction) -> Applied:
    none = torch.zeros((), dtype=torch.float64, device=ratio.sum_B.device)
    keep = ratio.finite_BT
    rho = _level_ratio(ratio, correction.level)
    high = rho > correction.upper
    low = rho < (correction.lower or 0.0)
    clip_high = _count(high, ratio) if correction.mode != "none" else none
    clip_low = _count(low, ratio) if correction.lower else none
    masked = none
    if correction.mode == "mask":
        keep = keep & ~(high | low)
        masked = clip_high + clip_low
    vetoed = _vetoed(ratio, correction.veto)
    if vetoed is not None:
        keep = keep & ~vetoed[:, None]
    if correction.mode == "none":
        weights = torch.ones_like(rho)
    else:
        weights = rho.clamp(min=correction.lower or 0.0, max=correction.upper)
    return Applied(
        weights_BT=torch.where(keep, weights, torch.zeros((), dtype=rho.dtype, device=rho.device)),
        keep_BT=keep,
        clip_high=clip_high,
        clip_low=clip_low,
        masked=masked,
        rejected_seqs=none,
        vetoed_seqs=none if vetoed is None else vetoed.sum(),
    )


def _level_ratio(ratio: LogRatio, level: str) -> Tensor:
    """rho at the level: (B, T) for tokens, (B, 1) where all tokens of a sequence share it."""
    if level == "token":
        return ratio.bounded_BT.exp()
    log_B = ratio.sum_B if level == "sequence" else ratio.sum_B / ratio.tokens_B.clamp(min=1)
    return log_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(ratio.exact_BT.dtype)[:, None]


def _count(outside: Tensor, ratio: LogRatio) -> Tensor:
    """Tokens outside a bound. Places that are not finite tokens have ratio 1 and are never outside."""
    if outside.shape[1] == 1:
        return (outside[:, 0] * ratio.tokens_B).sum()
    return torch.count_nonzero(outside)


def _vetoed(ratio: LogRatio, veto: tuple[float | None, float | None] | None) -> Tensor | None:
    """(B,) bool, sequences with a token whose exact ratio lies outside the veto's bounds; None where there is none."""
    if veto is None:
        return None
    low, high = veto
    vetoed = None
    if low is not None and ratio.min < math.log(low):
        vetoed = (ratio.exact_BT < math.log(low)).any(-1)
    if high is not None and ratio.max > math.log(high):
        above = (ratio.exact_BT > math.log(high)).any(-1)
        vetoed = above if vetoed is None else vetoed | above
    return vetoed
