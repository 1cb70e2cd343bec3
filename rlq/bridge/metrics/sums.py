"""The bridge's scalar metrics, as sums that can be added: over micro-batches, and over ranks.

No metric is a mean of means. A batch is summarized by three vectors (sums and counts, maxima, a histogram of log
ratios); the vectors of two parts of a batch merge into those of the whole, and every metric is a function of them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...metrics import BRIDGE, METRICS
from ..ratio import MAX_LOG_RATIO
from ..reduce import Reducer
from .histogram import quantiles

METRIC_NAMES = tuple(m.name for m in METRICS.values() if m.section in BRIDGE)
"""Names without the `rlq/` prefix. The last three are counts: finite tokens, tokens and sequences whose log ratio
lies beyond the bound of the exponent (a sequence ratio of exp(-120) is 0 in fp32; `bounded_seqs` counts it).

Raw metrics are over the N finite tokens, or over the sequences that have one. `weight_mean` is over the N tokens with
dropped ones as 0, `weight_min` and `weight_max` over kept tokens; `mask_frac` is the share of N dropped token by
token; `kept_token_frac` is over all tokens of the mask, non-finite ones included. `ppl_ratio` is the mean over
sequences of learner perplexity over sampler perplexity."""

SUMS: tuple[str, ...] = (
    "tokens",
    "mask_tokens",
    "seqs",
    "ell",
    "ell_abs",
    "ell_sq",
    "rho",
    "rho_sq",
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
"""Names of the entries of `BridgeSums.sums`."""

MAXIMA: tuple[str, ...] = ("ell", "neg_ell", "prob_diff", "weight", "neg_weight")
"""Names of the entries of `BridgeSums.maxima`."""


@dataclass(frozen=True)
class BridgeSums:
    """Additive summary of a batch. `a.merge(b)` summarizes the batch that a and b are the two parts of."""

    sums: Tensor
    """1-D fp64, sums and counts, by the names of `SUMS`."""
    maxima: Tensor
    """1-D fp64, by the names of `MAXIMA` (a minimum is the maximum of the negative); -inf where there was nothing."""
    histogram: Tensor
    """1-D fp64, counts of log ratios in the bins of `histogram`."""

    def merge(self, other: "BridgeSums") -> "BridgeSums":
        """Summary of both parts together."""
        return BridgeSums(
            self.sums + other.sums, torch.maximum(self.maxima, other.maxima), self.histogram + other.histogram
        )

    def reduce(self, reducer: Reducer) -> "BridgeSums":
        """Summary over all ranks: one sum call and one max call."""
        total = reducer.sum(torch.cat([self.sums, self.histogram]))
        n = len(SUMS)
        return BridgeSums(total[:n], reducer.max(self.maxima), total[n:])

    def value(self, name: str) -> float:
        """One entry of `sums` by name."""
        return float(self.sums[SUMS.index(name)])

    def metrics(self) -> dict[str, float]:
        """Metrics by the names of `METRIC_NAMES`.

        A batch without a finite token has no mean and no quantile: it yields its counts alone, never a NaN and never
        a good-looking 0.
        """
        s = dict(zip(SUMS, self.sums.tolist(), strict=True))
        m = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
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
    p01, p99 = (min(max(x, -m["neg_ell"]), m["ell"]) for x in quantiles(histogram, (0.01, 0.99)))
    return {
        "sampler_kl_k1": -s["ell"] / n,
        "sampler_kl_k2": s["ell_sq"] / (2 * n),
        "sampler_kl_k3": (s["rho_m1"] - s["ell"]) / n,
        "logratio_abs_mean": s["ell_abs"] / n,
        "logratio_abs_max": max(m["ell"], m["neg_ell"]),
        "ratio_mean": s["rho"] / n,
        "ratio_min": _exp(-m["neg_ell"]),
        "ratio_max": _exp(m["ell"]),
        "ratio_p01": _exp(p01),
        "ratio_p99": _exp(p99),
        "ess_token": _ess(s["rho"], s["rho_sq"], n),
        "ess_seq": _ess(s["seq_rho"], s["seq_rho_sq"], seqs),
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
        "ess_applied": _ess(s["weight"], s["weight_sq"], n),
    }


def _ess(total: float, square: float, n: float) -> float:
    """(sum w)^2 / (n sum w^2), at most 1 by Cauchy-Schwarz (rounding aside); 0 where every weight is 0."""
    return min(1.0, total**2 / (n * square)) if square else 0.0


def _exp(x: float) -> float:
    return math.exp(min(max(x, -MAX_LOG_RATIO), MAX_LOG_RATIO))
