"""From a log ratio and a `Correction` to weights and kept tokens.

The order is fixed: ratio at the level, cap, mode, batch normalization, drops (mask, rules, veto), self-normalization.

Axes: B sequences, T completion tokens (padded).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ratio import MAX_LOG_RATIO, LogRatio
from ..reduce import Reducer
from .correction import Correction
from .custom import custom_weights
from .rules import RuleInputs, outside

ESS_CAPS = 512
"""`ess_target` picks its cap from this many values, equally spaced in log between 1 and `upper`."""


@dataclass(frozen=True)
class Applied:
    """What a correction did to a batch: the outcome and the counts behind it."""

    weights_BT: Tensor
    """(B, T) weights, 0 where dropped."""
    keep_BT: Tensor
    """(B, T) bool."""
    upper: float
    """Upper bound in effect."""
    clip_high: Tensor
    """0-dim, tokens whose ratio at the correction's level lies above the upper bound in effect."""
    clip_low: Tensor
    """0-dim, tokens whose ratio at the correction's level lies below the lower bound."""
    masked: Tensor
    """0-dim, tokens dropped by mode `mask`, by a custom weight of 0, or by a token rule."""
    rejected_seqs: Tensor
    """0-dim, sequences dropped by a sequence rule."""
    vetoed_seqs: Tensor
    """0-dim, sequences dropped by the veto."""


@dataclass(frozen=True)
class _Weighed:
    """Weights before drops by rules and veto; fields as in `Applied`."""

    weights: Tensor
    """(B, T), or (B, 1) where all tokens of a sequence share one."""
    keep: Tensor
    upper: float
    clip_high: Tensor
    clip_low: Tensor


def apply_correction(inputs: RuleInputs, correction: Correction, reduce: Reducer | None) -> Applied:
    """Weights and kept tokens of one batch.

    Args:
        inputs: the batch.
        correction: validated settings.
        reduce: combines sums over ranks, for what depends on statistics of the whole batch.
    """
    ratio = inputs.ratio
    finite = ratio.finite_BT
    weighed = _weigh(ratio, correction, reduce)
    weights = weighed.weights
    if correction.normalize == "batch":
        weights = weights / _mean_weight(weights, ratio, correction.per_sequence, reduce)
    keep, sequence_drop = _rejected(inputs, correction, weighed.keep)
    none = _zero(ratio)
    masked = none if keep is finite else finite.sum() - keep.sum()
    rejected_seqs = none
    if sequence_drop is not None:
        rejected_seqs = (sequence_drop & finite).any(-1).sum()
        keep = keep & ~sequence_drop
    vetoed = _vetoed(ratio, correction.veto)
    if vetoed is not None:
        keep = keep & ~vetoed[:, None]
    if keep is not finite or weights.shape != finite.shape or correction.lower or correction.custom:
        weights = torch.where(keep, weights, torch.zeros((), dtype=weights.dtype, device=weights.device))
    if correction.normalize == "self":
        weights = weights * _self_factor(weights, keep if correction.denominator == "kept" else finite, reduce)
    return Applied(
        weights_BT=weights,
        keep_BT=keep,
        upper=weighed.upper,
        clip_high=weighed.clip_high,
        clip_low=weighed.clip_low,
        masked=masked,
        rejected_seqs=rejected_seqs,
        vetoed_seqs=none if vetoed is None else vetoed.sum(),
    )


def _weigh(ratio: LogRatio, correction: Correction, reduce: Reducer | None) -> _Weighed:
    none = _zero(ratio)
    finite = ratio.finite_BT
    if correction.custom is not None:
        weights = custom_weights(correction.custom, ratio)
        return _Weighed(weights, finite & (weights > 0), correction.upper, none, none)
    if correction.mode == "none":
        ones = torch.ones_like(ratio.sum_B, dtype=ratio.exact_BT.dtype)[:, None]
        return _Weighed(ones, finite, correction.upper, none, none)
    rho = level_ratio(ratio, correction.level)
    upper = correction.upper
    if correction.ess_target is not None:
        upper = _ess_cap(rho, ratio, correction, correction.ess_target, reduce)
    out = rho > upper
    clip_high = _count(out, ratio)
    clip_low = none
    if correction.lower:
        below = rho < correction.lower
        clip_low = _count(below, ratio)
        out |= below
    if correction.mode == "mask":
        return _Weighed(rho.masked_fill(out, 0.0), finite & ~out, upper, clip_high, clip_low)
    return _Weighed(rho.clamp(min=correction.lower or 0.0, max=upper), finite, upper, clip_high, clip_low)


def _rejected(inputs: RuleInputs, correction: Correction, keep: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tokens that the token rules keep, and (B, 1) sequences that a sequence rule drops; None without such a rule."""
    sequence_drop = None
    for rule in correction.reject or ():
        out = outside(rule, inputs)
        if rule.aggregation == "token":
            keep = keep & ~out
        else:
            sequence_drop = out if sequence_drop is None else sequence_drop | out
    return keep, sequence_drop


def _zero(ratio: LogRatio) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=ratio.sum_B.device)


def level_ratio(ratio: LogRatio, level: str) -> Tensor:
    """rho at the level: (B, T) with 0 outside the finite tokens, or (B, 1) where a sequence shares it."""
    if level == "token":
        return ratio.rho_BT
    if level == "segment":
        log = _segment_mean(ratio)
    else:
        log = (ratio.sum_B if level == "sequence" else ratio.sum_B / ratio.tokens_B.clamp(min=1))[:, None]
    rho = log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(ratio.exact_BT.dtype)
    return rho if level != "segment" else torch.where(ratio.finite_BT, rho, 0.0)


def _segment_mean(ratio: LogRatio) -> Tensor:
    """(B, T) fp64 mean log ratio over each token's contiguous run of the mask; non-finite tokens do not split a run."""
    mask = ratio.mask_BT
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    segment = torch.where(mask, starts.cumsum(-1), 0)  # 0 is padding; runs count from 1
    sums = torch.zeros((*mask.shape[:1], mask.shape[1] + 1), dtype=torch.float64, device=mask.device)
    counts = sums.scatter_add(1, segment, ratio.finite_BT.double()).clamp_(min=1)
    sums.scatter_add_(1, segment, ratio.exact_BT.double())
    return (sums / counts).gather(1, segment)


def _count(out: Tensor, ratio: LogRatio) -> Tensor:
    """Finite tokens outside a bound."""
    if out.shape[1] == 1:
        return (out[:, 0] * ratio.tokens_B).sum()
    return torch.count_nonzero(out & ratio.finite_BT)


def _vetoed(ratio: LogRatio, veto: tuple[float | None, float | None] | None) -> Tensor | None:
    """(B,) bool, sequences with a token whose exact ratio lies outside the veto's bounds; None where there is none."""
    low, high = veto or (None, None)
    vetoed = None
    if low is not None and ratio.min < math.log(low):
        vetoed = (ratio.exact_BT < math.log(low)).any(-1)
    if high is not None and ratio.max > math.log(high):
        above = (ratio.exact_BT > math.log(high)).any(-1)
        vetoed = above if vetoed is None else vetoed | above
    return vetoed


def _total(values: Tensor, reduce: Reducer | None) -> Tensor:
    return values if reduce is None else reduce.sum(values)


def _mean_weight(weights: Tensor, ratio: LogRatio, per_sequence: bool, reduce: Reducer | None) -> float:
    """Mean weight over finite tokens, or over sequences with tokens; 1 where it is 0, so that nothing divides by 0."""
    share = (ratio.tokens_B > 0)[:, None] if per_sequence else ratio.finite_BT
    summed = torch.where(share, weights, 0.0).sum(dtype=torch.float64)
    total, count = _total(torch.stack([summed, share.sum().double()]), reduce).tolist()
    return total / count if total > 0 else 1.0


def _self_factor(weights: Tensor, counted: Tensor, reduce: Reducer | None) -> float:
    """Factor that makes sum(weights) equal to the loss denominator, so that the loss is sum(w x) / sum(w)."""
    sums = torch.stack([weights.sum(dtype=torch.float64), counted.sum().double()])
    total, count = _total(sums, reduce).tolist()
    return count / total if total > 0 else 1.0


def _ess_cap(rho: Tensor, ratio: LogRatio, correction: Correction, target: float, reduce: Reducer | None) -> float:
    """Largest of `ESS_CAPS` caps C in [1, upper] with ESS(min(rho, C)) >= target over finite tokens.

    ESS falls monotonically with C, since E[min(rho, C)^2] <= C E[min(rho, C)]. Below the smallest such C, 1 is used.
    """
    log_upper = min(math.log(correction.upper), MAX_LOG_RATIO) if correction.upper > 1 else 0.0
    caps = torch.linspace(0.0, log_upper, ESS_CAPS, dtype=torch.float64, device=rho.device).exp()
    w = torch.where(ratio.finite_BT, rho, 0.0).double().clamp(min=correction.lower or 0.0)[ratio.finite_BT]
    index = torch.bucketize(w, caps)  # caps[index - 1] < w <= caps[index]; ESS_CAPS means above every cap
    sums = [torch.bincount(index, weights=x, minlength=ESS_CAPS + 1) for x in (torch.ones_like(w), w, w * w)]
    count, first, second = _total(torch.cat(sums), reduce).view(3, -1).cumsum(-1)
    total = count[-1]
    above = total - count[:-1]
    mean, square = first[:-1] + above * caps, second[:-1] + above * caps**2
    enough = mean**2 >= target * total * square
    allowed = int(enough.nonzero().max()) if bool(enough.any()) else 0
    return float(caps[allowed])
