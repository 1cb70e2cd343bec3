"""The bridge's scalar metrics, as sums that can be added: over micro-batches, and over ranks.

No metric is a mean of means. A batch is summarised by three vectors (sums and counts, maxima, a histogram of log ratios);
vectors of two parts of a batch merge into the vectors of the whole, and every metric is a function of the merged vectors.

Axes: B sequences, T completion tokens (padded).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from .ratio import MAX_LOG_RATIO, LogRatio

METRIC_NAMES = (
    "sampler_kl_k1",
    "sampler_kl_k2",
    "sampler_kl_k3",
    "logratio_abs_mean",
    "logratio_abs_max",
    "ratio_mean",
    "ratio_min",
    "ratio_max",
    "ratio_p01",
    "ratio_p99",
    "ess_token",
    "ess_seq",
    "chi2_token",
    "chi2_seq",
    "ppl_ratio",
    "prob_diff_mean",
    "prob_diff_max",
    "weight_mean",
    "weight_min",
    "weight_max",
    "clip_frac_high",
    "clip_frac_low",
    "mask_frac",
    "reject_seq_frac",
    "veto_seq_frac",
    "kept_token_frac",
    "ess_applied",
    "nonfinite_tokens",
    "tokens",
    "bounded_tokens",
    "bounded_seqs",
)
"""Names without the ``rlq/`` prefix. The last three are counts: finite tokens, tokens and sequences whose log ratio
lies beyond the bound of the exponent (a sequence ratio of exp(-120) is 0 in fp32: ``bounded_seqs`` says so)."""


class Reducer(Protocol):
    """How 1-D float64 tensors combine over the ranks that share a batch."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        ...


@dataclass(frozen=True)
class DistributedReducer:
    """Reduce over a ``torch.distributed`` process group; every rank must make the same calls."""

    group: torch.distributed.ProcessGroup | None = None
    """Ranks that share the batch; None is the default group."""

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.SUM, self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        values = values.clone()
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, self.group)
        return values


@dataclass(frozen=True)
class Applied:
    """What the correction did to a batch; the part of the sums that the log ratio alone does not know."""

    weights_BT: Tensor
    """(B, T) weights, 0 where dropped."""

    keep_BT: Tensor
    """(B, T) bool."""

    clip_high: Tensor
    """0-dim, tokens whose ratio at the correction's level lies above the upper bound."""

    clip_low: Tensor
    """0-dim, tokens whose ratio at the correction's level lies below the lower bound."""

    masked: Tensor
    """0-dim, tokens dropped because their ratio lies outside the band of mode ``mask``."""

    rejected_seqs: Tensor
    """0-dim, sequences with tokens that lost every token to rejection rules."""

    vetoed_seqs: Tensor
    """0-dim, sequences with tokens dropped by the veto."""


_SUMS = (
    "tokens",
    "mask_tokens",
    "seqs",
    "ell",
    "ell_abs",
    "ell_sq",
    "rho_m1",
    "rho_m1_sq",
    "prob_diff",
    "bounded_tokens",
    "seq_rho",
    "seq_rho_sq",
    "seq_ppl_ratio",
    "bounded_seqs",
    "weight",
    "weight_sq",
    "kept",
    "clip_high",
    "clip_low",
    "masked",
    "rejected_seqs",
    "vetoed_seqs",
)
_MAXIMA = ("ell", "neg_ell", "prob_diff", "weight", "neg_weight")

# Histogram of the log ratio: bins are the leading bits of the float, so their width is relative to |ell|.
_MANTISSA_BITS = 6
_SHIFT = 23 - _MANTISSA_BITS
_SIGN_BIN = 1 << (31 - _SHIFT)
_FIRST_BIN = (127 - 20) << _MANTISSA_BITS  # |ell| = 2^-20, below which a log ratio counts as 0
_LAST_BIN = (127 + 4) << _MANTISSA_BITS | 1 << (_MANTISSA_BITS - 2)  # |ell| = 20 = 1.25 * 2^4
_HALF = _LAST_BIN - _FIRST_BIN + 1
QUANTILE_RESOLUTION = 2.0 ** -(_MANTISSA_BITS + 1)
"""``ratio_p01`` and ``ratio_p99`` come from a histogram whose bins are 1/64 of |ell| wide: the log of the reported
ratio is within this share (1/128) of the log of the exact empirical quantile, or within 2^-20 of it near ratio 1."""


@dataclass(frozen=True)
class BridgeSums:
    """Additive summary of a batch. ``a.merge(b)`` summarises the batch that a and b are the two parts of."""

    sums: Tensor
    """1-D fp64, sums and counts."""

    maxima: Tensor
    """1-D fp64, maxima (a minimum is stored as the maximum of the negative); -inf where there was nothing."""

    histogram: Tensor
    """1-D fp64, counts of log ratios in fixed bins of both signs, 0 in the middle."""

    def merge(self, other: BridgeSums) -> BridgeSums:
        """Summary of both parts together."""
        return BridgeSums(
            self.sums + other.sums, torch.maximum(self.maxima, other.maxima), self.histogram + other.histogram
        )

    def reduce(self, reducer: Reducer) -> BridgeSums:
        """Summary over all ranks: one sum call and one max call."""
        total = reducer.sum(torch.cat([self.sums, self.histogram]))
        n = len(self.sums)
        return BridgeSums(total[:n], reducer.max(self.maxima), total[n:])

    def value(self, name: str) -> float:
        """One entry of ``sums`` by name."""
        return float(self.sums[_SUMS.index(name)])

    def metrics(self) -> dict[str, float]:
        """Metrics by the names of ``METRIC_NAMES``.

        A batch without a finite token has no mean and no quantile: it yields its counts alone, never a NaN and never
        a good-looking 0.
        """
        s = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        m = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        counts = {
            "nonfinite_tokens": s["mask_tokens"] - s["tokens"],
            "tokens": s["tokens"],
            "bounded_tokens": s["bounded_tokens"],
            "bounded_seqs": s["bounded_seqs"],
        }
        if s["tokens"] == 0:
            return counts
        return _raw_metrics(s, m, self.histogram) | _applied_metrics(s, m) | counts


def _raw_metrics(s: dict[str, float], m: dict[str, float], histogram: Tensor) -> dict[str, float]:
    n, seqs = s["tokens"], s["seqs"]
    p01, p99 = (min(max(x, -m["neg_ell"]), m["ell"]) for x in _quantiles(histogram, (0.01, 0.99)))
    rho, rho_sq = n + s["rho_m1"], n + 2 * s["rho_m1"] + s["rho_m1_sq"]
    return {
        "sampler_kl_k1": -s["ell"] / n,
        "sampler_kl_k2": s["ell_sq"] / (2 * n),
        "sampler_kl_k3": (s["rho_m1"] - s["ell"]) / n,
        "logratio_abs_mean": s["ell_abs"] / n,
        "logratio_abs_max": max(m["ell"], m["neg_ell"]),
        "ratio_mean": rho / n,
        "ratio_min": _exp(-m["neg_ell"]),
        "ratio_max": _exp(m["ell"]),
        "ratio_p01": _exp(p01),
        "ratio_p99": _exp(p99),
        "ess_token": rho**2 / (n * rho_sq),
        "ess_seq": s["seq_rho"] ** 2 / (seqs * s["seq_rho_sq"]),
        "chi2_token": (2 * s["rho_m1"] + s["rho_m1_sq"]) / n,
        "chi2_seq": s["seq_rho_sq"] / seqs - 1,
        "ppl_ratio": s["seq_ppl_ratio"] / seqs,
        "prob_diff_mean": s["prob_diff"] / n,
        "prob_diff_max": m["prob_diff"],
    }


def _applied_metrics(s: dict[str, float], m: dict[str, float]) -> dict[str, float]:
    n, seqs = s["tokens"], s["seqs"]
    return {
        "weight_mean": s["weight"] / n,
        "weight_min": -m["neg_weight"] if s["kept"] else 0.0,
        "weight_max": m["weight"] if s["kept"] else 0.0,
        "clip_frac_high": s["clip_high"] / n,
        "clip_frac_low": s["clip_low"] / n,
        "mask_frac": s["masked"] / n,
        "reject_seq_frac": s["rejected_seqs"] / seqs,
        "veto_seq_frac": s["vetoed_seqs"] / seqs,
        "kept_token_frac": s["kept"] / s["mask_tokens"],
        "ess_applied": s["weight"] ** 2 / (n * s["weight_sq"]) if s["weight_sq"] else 0.0,
    }


def _exp(x: float) -> float:
    return math.exp(min(max(x, -MAX_LOG_RATIO), MAX_LOG_RATIO))


def sums_of(
    ratio: LogRatio, learner_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, applied: Applied
) -> BridgeSums:
    """Summarise one batch (or one micro-batch, or one rank's share of it).

    Everything that is summed is 0 outside the finite tokens, so no pass needs the mask again. rho enters as rho - 1
    (``expm1``): k3 and chi2 are differences that would lose all digits for ratios near 1.
    """
    ell, bounded = ratio.exact_BT, ratio.bounded_BT
    rho_m1 = torch.expm1(bounded)
    diff = _prob_diff(learner_logprobs, sampler_logprobs, ratio.finite_BT, ell.dtype)
    present = ratio.tokens_B > 0
    seq_log = ratio.sum_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    seq_rho = torch.where(present, seq_log.exp(), 0.0)
    mean_B = ratio.sum_B / ratio.tokens_B.clamp(min=1)
    ppl = torch.where(present, (-mean_B).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    any_bounded = max(ratio.max, -ratio.min) > MAX_LOG_RATIO
    weights, keep = applied.weights_BT, applied.keep_BT
    entries: dict[str, Tensor | float] = {
        "tokens": ratio.tokens_B.sum(),
        "mask_tokens": torch.count_nonzero(mask),
        "seqs": present.sum(),
        "ell": ratio.sum_B.sum(),
        "ell_abs": _norm(ell, 1),
        "ell_sq": _norm(ell, 2).square(),
        "rho_m1": rho_m1.sum(dtype=torch.float64),
        "rho_m1_sq": _norm(rho_m1, 2).square(),
        "prob_diff": _norm(diff, 1),
        "bounded_tokens": (ell.abs() > MAX_LOG_RATIO).sum() if any_bounded else 0.0,
        "seq_rho": seq_rho.sum(),
        "seq_rho_sq": seq_rho.square().sum(),
        "seq_ppl_ratio": ppl.sum(),
        "bounded_seqs": (ratio.sum_B.abs() > MAX_LOG_RATIO).sum(),
        "weight": weights.sum(dtype=torch.float64),
        "weight_sq": _norm(weights, 2).square(),
        "kept": torch.count_nonzero(keep),
        "clip_high": applied.clip_high,
        "clip_low": applied.clip_low,
        "masked": applied.masked,
        "rejected_seqs": applied.rejected_seqs,
        "vetoed_seqs": applied.vetoed_seqs,
    }
    assert tuple(entries) == _SUMS
    return BridgeSums(_vector(entries.values(), ell), _maxima(ratio, diff, applied), _histogram(ell, ratio.tokens_B))


def _norm(x: Tensor, order: int) -> Tensor:
    return torch.linalg.vector_norm(x, order, dtype=torch.float64)


def _vector(values, like: Tensor) -> Tensor:
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=like.device) for v in values])


def _prob_diff(learner: Tensor, sampler: Tensor, finite_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """|p_learner - p_sampler|, probabilities capped at 1 so that a malformed positive log-prob cannot overflow."""
    p = learner.detach().to(dtype).clamp(max=0.0).exp_()
    p -= sampler.detach().to(dtype).clamp(max=0.0).exp_()
    return torch.where(finite_BT, p, torch.zeros((), dtype=dtype, device=p.device)).abs_()


def _maxima(ratio: LogRatio, diff: Tensor, applied: Applied) -> Tensor:
    nothing = torch.tensor(-math.inf, dtype=torch.float64, device=diff.device)
    if diff.numel() == 0 or not bool((ratio.tokens_B > 0).any()):
        return nothing.expand(len(_MAXIMA)).clone()
    # Masked places hold ell = 0, which must not pass for an observed extreme when every real one lies on one side.
    ell, finite = ratio.exact_BT, ratio.finite_BT
    top = ratio.max if ratio.max > 0 else torch.where(finite, ell, -math.inf).amax()
    bottom = ratio.min if ratio.min < 0 else torch.where(finite, ell, math.inf).amin()
    lightest = torch.where(applied.keep_BT, applied.weights_BT, math.inf).amin()
    return _vector((top, -bottom, diff.amax(), applied.weights_BT.amax(), -lightest), diff)


def _histogram(ell: Tensor, tokens_B: Tensor) -> Tensor:
    """Counts by sign, exponent and leading mantissa bits of ell: 2 * ``_HALF`` + 1 bins in ascending order."""
    bins = ell.float().view(torch.int32) >> _SHIFT
    bins &= 2 * _SIGN_BIN - 1
    counts = torch.bincount(bins.flatten(), minlength=2 * _SIGN_BIN).double()
    halves = []
    for sign in (_SIGN_BIN, 0):
        half = counts[sign + _FIRST_BIN : sign + _LAST_BIN + 1].clone()
        half[-1] += counts[sign + _LAST_BIN + 1 : sign + _SIGN_BIN].sum()
        halves.append(half)
    negative, positive = halves
    zero = tokens_B.sum() - negative.sum() - positive.sum()  # not counted directly: padding sits in this bin too
    return torch.cat([negative.flip(0), zero.reshape(1), positive])


def _quantiles(histogram: Tensor, probabilities: tuple[float, ...]) -> list[float]:
    """Log ratios at the given probabilities: the centre of the bin that holds the observation of that rank."""
    cumulative = histogram.cpu().cumsum(0)
    total = float(cumulative[-1])
    out = []
    for p in probabilities:
        rank = max(1.0, math.ceil(p * total))
        index = int(torch.searchsorted(cumulative, torch.tensor(rank, dtype=torch.float64))) - _HALF
        out.append(math.copysign(_bin_centre(abs(index)), index) if index else 0.0)
    return out


def _bin_centre(k: int) -> float:
    """|ell| in the middle of the k-th bin above zero, k >= 1."""
    exponent, mantissa = divmod(_FIRST_BIN + k - 1, 1 << _MANTISSA_BITS)
    return 2.0 ** (exponent - 127) * (1 + (mantissa + 0.5) / (1 << _MANTISSA_BITS))
