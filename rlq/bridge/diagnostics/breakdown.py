"""Where in the batch the mismatch sits: tables over position, probability, entropy, advantage sign and length.

Tables of two parts of a batch, of several ranks or of several steps merge by addition.

Axes: B sequences, T completion tokens (padded).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...errors import ConfigError
from ..correct import BridgeOutput
from ..metrics.histogram import bin_edges
from ..metrics.sums import BridgeSums
from ..reduce import Reducer

_LENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
EDGES: dict[str, tuple[float, ...]] = {
    "position": _LENGTHS,
    "sampler_prob": (0.001, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 0.999),
    "entropy": (0.01, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0),
    "advantage_sign": (-0.5, 0.5),
    "length": _LENGTHS,
}
"""Upper edges of the bins of each axis, exclusive; the last bin is open. Position counts completion tokens from 0,
entropy is in nats, the advantage's sign is -1, 0 or 1, length is that of the completion."""

_COLUMNS = ("tokens", "ell", "ell_abs", "k3", "rho", "weight", "dropped")


@dataclass(frozen=True)
class BinnedTable:
    """Sums per bin along one axis."""

    axis: str
    """A key of `EDGES`."""
    sums: Tensor
    """(bins, columns) fp64."""

    def merge(self, other: "BinnedTable") -> "BinnedTable":
        """Table of both parts together."""
        return BinnedTable(self.axis, self.sums + other.sums)

    def rows(self) -> list[dict[str, float | str]]:
        """One row per bin that holds a token: its label and the means of the mismatch, weight and drops in it."""
        edges = EDGES[self.axis]
        labels = [f"< {edges[0]:g}", *(f"{a:g} to {b:g}" for a, b in pairwise(edges))]
        labels.append(f">= {edges[-1]:g}")
        rows = []
        for label, values in zip(labels, self.sums.tolist(), strict=True):
            s = dict(zip(_COLUMNS, values, strict=True))
            n = s["tokens"]
            if n:
                rows.append(
                    {
                        "axis": self.axis,
                        "bin": label,
                        "tokens": n,
                        "sampler_kl_k1": -s["ell"] / n,
                        "sampler_kl_k3": s["k3"] / n,
                        "logratio_abs_mean": s["ell_abs"] / n,
                        "ratio_mean": s["rho"] / n,
                        "weight_mean": s["weight"] / n,
                        "dropped_frac": s["dropped"] / n,
                    }
                )
        return rows


@torch.no_grad()
def breakdown(
    output: BridgeOutput,
    sampler_logprobs: Tensor,
    *,
    entropy: Tensor | None = None,
    advantages: Tensor | None = None,
    reduce: Reducer | None = None,
) -> dict[str, BinnedTable]:
    """Tables of the mismatch along every axis that the arguments allow.

    Args:
        output: what `correct` returned for the batch.
        sampler_logprobs: (B, T), as passed to `correct`.
        entropy: (B, T) nats, of the learner's next-token distribution.
        advantages: (B,) or (B, T).
        reduce: combines sums over the ranks that share the batch.

    Raises:
        ConfigError: an argument's shape does not match the batch.
    """
    finite = output.finite
    order = finite.cumsum(-1)
    axes = {
        "position": order - 1,
        "sampler_prob": sampler_logprobs.detach().float().exp(),
        "length": order[:, -1:].expand_as(finite) if finite.shape[1] else order,
    }
    if entropy is not None:
        axes["entropy"] = _like(entropy, finite, "entropy")
    if advantages is not None:
        axes["advantage_sign"] = _like(advantages, finite, "advantages").sign()
    columns = _columns(output)
    tables = {}
    for axis, values in axes.items():
        edges = torch.tensor(EDGES[axis], dtype=torch.float64, device=finite.device)
        index = torch.bucketize(values[finite].double(), edges, right=True)
        sums = columns.new_zeros((len(edges) + 1, len(_COLUMNS))).index_add_(0, index, columns)
        if reduce is not None:
            sums = reduce.sum(sums.flatten()).view_as(sums)
        tables[axis] = BinnedTable(axis, sums)
    return tables


def _like(values: Tensor, finite: Tensor, name: str) -> Tensor:
    if values.shape == finite.shape[:1]:
        values = values[:, None].expand_as(finite)
    if values.shape != finite.shape:
        raise ConfigError(f"{name} has shape {tuple(values.shape)}: pass one value per token of {tuple(finite.shape)}")
    return values.detach()


def _columns(output: BridgeOutput) -> Tensor:
    """(N, columns) fp64 over the finite tokens."""
    ell = output.log_ratio[output.finite].double()
    rho_m1 = torch.expm1(ell)
    weight = output.weights[output.finite].double()
    dropped = (~output.keep[output.finite]).double()
    return torch.stack([torch.ones_like(ell), ell, ell.abs(), rho_m1 - ell, rho_m1 + 1, weight, dropped], dim=1)


def log_ratio_histogram(sums: BridgeSums, bins: int = 64) -> tuple[list[float], list[float]]:
    """The batch's histogram of log ratios on `bins` equal bins, symmetric about 0 and as wide as the data.

    Returns:
        (counts, edges) with one more edge than counts: what `numpy.histogram` returns and wandb takes.
    """
    counts = sums.histogram.cpu()
    uppers = torch.tensor(bin_edges(), dtype=torch.float64)
    occupied = counts.nonzero().flatten()
    if not len(occupied):
        return [0.0] * bins, torch.linspace(-1.0, 1.0, bins + 1).tolist()
    widest = max(abs(float(uppers[i])) for i in (occupied[0], occupied[-1]) if math.isfinite(float(uppers[i])))
    edges = torch.linspace(-widest, widest, bins + 1, dtype=torch.float64)
    index = torch.bucketize(uppers.clamp(-widest, widest), edges[1:-1])
    return torch.zeros(bins, dtype=torch.float64).index_add_(0, index, counts).tolist(), edges.tolist()


@dataclass(frozen=True)
class WorstToken:
    """One of the tokens on which learner and sampler disagree most."""

    sequence: int
    """Row of the batch."""
    position: int
    """Column of the batch."""
    token: int
    """Id."""
    context: tuple[int, ...]
    """Ids of the tokens before it, oldest first."""
    log_ratio: float
    """Learner minus sampler, bounded."""
    learner_logprob: float
    """Nats."""
    sampler_logprob: float
    """Nats."""
    kept: bool
    """Whether it stayed in the loss."""


@torch.no_grad()
def worst_tokens(
    output: BridgeOutput,
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    token_ids: Tensor,
    *,
    count: int = 20,
    context: int = 8,
) -> list[WorstToken]:
    """The tokens with the largest absolute log ratio, worst first.

    Args:
        output: what `correct` returned for the batch.
        learner_logprobs: (B, T), as passed to `correct`.
        sampler_logprobs: (B, T), as passed to `correct`.
        token_ids: (B, T) integer, completion ids.
        count: how many at most.
        context: how many ids before the token to keep.
    """
    size = torch.where(output.finite, (learner_logprobs - sampler_logprobs).detach().abs(), -1.0).flatten()
    worst = []
    for index in size.topk(min(count, int(output.finite.sum()))).indices.tolist():
        i, t = divmod(index, output.finite.shape[1])
        worst.append(
            WorstToken(
                sequence=i,
                position=t,
                token=int(token_ids[i, t]),
                context=tuple(token_ids[i, max(0, t - context) : t].tolist()),
                log_ratio=float(output.log_ratio[i, t]),
                learner_logprob=float(learner_logprobs[i, t]),
                sampler_logprob=float(sampler_logprobs[i, t]),
                kept=bool(output.keep[i, t]),
            )
        )
    return worst
