"""One pass from a corrected batch to its additive summary.

Everything that is summed is 0 outside the finite tokens, so no pass needs the mask again. k3 and chi2 come from rho - 1
(`expm1`): as differences of rho they would lose all digits for ratios near 1.

Axes: B sequences, T completion tokens (padded).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..correction.rules import RuleInputs
from ..correction.weights import Applied
from ..ratio import MAX_LOG_RATIO, LogRatio
from .histogram import histogram
from .sums import MAXIMA, SUMS, BridgeSums


@dataclass(frozen=True)
class RawSums:
    """The part of a summary that no correction changes; computed once for many of them."""

    entries: dict[str, Tensor | float]
    """Entries of `BridgeSums.sums` by name."""
    maxima: dict[str, Tensor | float]
    """Entries of `BridgeSums.maxima` by name."""
    histogram: Tensor
    """1-D fp64, counts of log ratios."""
    scratch_BT: Tensor
    """(B, T) memory to overwrite."""


def raw_sums(inputs: RuleInputs) -> RawSums:
    """Everything about the log ratio and the probabilities that the metrics need."""
    ratio = inputs.ratio
    ell = ratio.exact_BT
    rho_m1 = torch.expm1(ratio.bounded_BT)
    rho_m1_sum, rho_m1_sq = _sum(rho_m1), _square_sum(rho_m1)
    diff = _abs_prob_diff(inputs, rho_m1)
    tokens = ratio.tokens_B.sum()
    entries = {
        "tokens": tokens,
        "mask_tokens": tokens if ratio.finite_BT is ratio.mask_BT else torch.count_nonzero(ratio.mask_BT),
        **_sequence_sums(ratio),
        "ell_abs": torch.linalg.vector_norm(ell, 1, dim=-1).double().sum(),
        "ell_sq": _square_sum(ell),
        "rho": _sum(ratio.rho_BT),
        "rho_sq": _square_sum(ratio.rho_BT),
        "rho_m1": rho_m1_sum,
        "rho_m1_sq": rho_m1_sq,
        "bounded_tokens": _beyond(ell) if max(ratio.max, -ratio.min) > MAX_LOG_RATIO else 0.0,
        "prob_diff": _sum(diff),
    }
    return RawSums(entries, _raw_maxima(ratio, diff), histogram(ell, tokens, scratch=diff), scratch_BT=diff)


def summarize(ratio: LogRatio, raw: RawSums, applied: Applied) -> BridgeSums:
    """Summary of one batch, of one micro-batch, or of one rank's share, under one correction."""
    weights, keep = applied.weights_BT, applied.keep_BT
    entries = raw.entries | {
        "weight": _sum(weights),
        "weight_sq": _square_sum(weights),
        "kept": raw.entries["tokens"] if keep is ratio.finite_BT else torch.count_nonzero(keep),
        "clip_high": applied.clip_high,
        "clip_low": applied.clip_low,
        "masked": applied.masked,
        "rejected_seqs": applied.rejected_seqs,
        "vetoed_seqs": applied.vetoed_seqs,
    }
    maxima = dict(raw.maxima)
    if weights.numel():
        maxima["weight"] = weights.amax()
        infinity = torch.full((), math.inf, dtype=weights.dtype, device=weights.device)
        maxima["neg_weight"] = -torch.where(keep, weights, infinity, out=raw.scratch_BT).amin()
    return BridgeSums(
        sums=_vector((entries[name] for name in SUMS), weights),
        maxima=_vector((maxima.get(name, -math.inf) for name in MAXIMA), weights),
        histogram=raw.histogram,
    )


def _sequence_sums(ratio: LogRatio) -> dict[str, Tensor]:
    present = ratio.tokens_B > 0
    seq_log = ratio.sum_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    seq_rho = torch.where(present, seq_log.exp(), 0.0)
    mean_B = ratio.sum_B / ratio.tokens_B.clamp(min=1)
    ppl_ratio = torch.where(present, (-mean_B).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    return {
        "seqs": present.sum(),
        "ell": ratio.sum_B.sum(),
        "seq_rho": seq_rho.sum(),
        "seq_rho_sq": seq_rho.square().sum(),
        "seq_ppl_ratio": ppl_ratio.sum(),
        "bounded_seqs": _beyond(ratio.sum_B),
    }


def _beyond(log: Tensor) -> Tensor:
    return (log.abs() > MAX_LOG_RATIO).sum()


def _abs_prob_diff(inputs: RuleInputs, rho_m1: Tensor) -> Tensor:
    """(B, T) abs(p_learner - p_sampler) as p_sampler * abs(rho - 1); overwrites `rho_m1`."""
    ratio = inputs.ratio
    sampler = torch.where(ratio.finite_BT, inputs.sampler_BT.to(rho_m1.dtype), 0.0)
    diff = rho_m1.mul_(sampler.clamp_(max=0.0).exp_()).abs_()
    if ratio.max > MAX_LOG_RATIO:  # the bounded ratio is too small there, and p_sampler is nothing beside p_learner
        learner = inputs.learner_BT.to(diff.dtype).clamp(max=0.0)
        diff = torch.where(ratio.exact_BT > MAX_LOG_RATIO, learner.exp(), diff)
    return diff


def _sum(x_BT: Tensor) -> Tensor:
    """Rows in the dtype of x (cascade summation, within 1e-7 of exact), then fp64: a third of the cost of all-fp64."""
    return x_BT.sum(-1).double().sum()


def _square_sum(x_BT: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_BT, dim=-1).double().square().sum()


def _vector(values: Iterable[Tensor | float], like: Tensor) -> Tensor:
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=like.device) for v in values])


def _raw_maxima(ratio: LogRatio, diff: Tensor) -> dict[str, Tensor | float]:
    if diff.numel() == 0:
        return {}
    # Padding holds ell = 0, which must not pass for an observed extreme when every real one lies on one side.
    ell, finite = ratio.exact_BT, ratio.finite_BT
    top = ratio.max if ratio.max > 0 else torch.where(finite, ell, -math.inf).amax()
    bottom = ratio.min if ratio.min < 0 else torch.where(finite, ell, math.inf).amin()
    return {"ell": top, "neg_ell": -bottom, "prob_diff": diff.amax()}
