"""A mergeable histogram of log ratios, from which quantiles come without a sort.

Bins are the leading bits of the float itself (sign, exponent, 6 mantissa bits), so their width is relative: 1/64 of
|ell|. The ratio of a bf16 sampler (|ell| about 1e-3) and of an NVFP4 sampler (about 1) are resolved alike.
"""

import math

import torch
from torch import Tensor

_MANTISSA_BITS = 6
_SHIFT = 23 - _MANTISSA_BITS
_SIGN_BIN = 1 << (31 - _SHIFT)
_FIRST_BIN = (127 - 20) << _MANTISSA_BITS  # |ell| = 2^-20, below which a log ratio counts as 0
_LAST_BIN = (127 + 4) << _MANTISSA_BITS | 1 << (_MANTISSA_BITS - 2)  # |ell| = 20 = 1.25 * 2^4
_HALF = _LAST_BIN - _FIRST_BIN + 1

QUANTILE_RESOLUTION = 2.0 ** -(_MANTISSA_BITS + 1)
"""The log of a reported quantile of the ratio is within this share (1/128) of the log of the exact one, or within
2^-20 of it near ratio 1."""


def histogram(ell: Tensor, tokens: Tensor, scratch: Tensor) -> Tensor:
    """Counts of log ratios in fixed bins, ascending: 2 * `_HALF` + 1 fp64 values, those beyond +-20 in the end bins.

    Args:
        ell: any shape, fp32 or fp64; places that are not tokens hold 0.
        tokens: 0-dim, how many places are tokens.
        scratch: like `ell`, overwritten.
    """
    bits = ell.float().view(torch.int32)
    bins = (
        torch.bitwise_right_shift(bits, _SHIFT, out=scratch.view(torch.int32))
        if ell.dtype == torch.float32
        else bits >> _SHIFT
    )
    bins &= 2 * _SIGN_BIN - 1
    counts = torch.bincount(bins.flatten(), minlength=2 * _SIGN_BIN).double()
    halves = []
    for sign in (_SIGN_BIN, 0):
        half = counts[sign + _FIRST_BIN : sign + _LAST_BIN + 1].clone()
        half[-1] += counts[sign + _LAST_BIN + 1 : sign + _SIGN_BIN].sum()
        halves.append(half)
    negative, positive = halves
    zero = tokens - negative.sum() - positive.sum()  # not counted directly: padding sits in this bin too
    return torch.cat([negative.flip(0), zero.reshape(1), positive])


def quantiles(histogram: Tensor, probabilities: tuple[float, ...]) -> list[float]:
    """Log ratios at the given probabilities: the center of the bin that holds the observation of that rank."""
    cumulative = histogram.cpu().cumsum(0)
    total = float(cumulative[-1])
    out = []
    for p in probabilities:
        rank = max(1.0, math.ceil(p * total))
        index = int(torch.searchsorted(cumulative, torch.tensor(rank, dtype=torch.float64))) - _HALF
        out.append(math.copysign(_bin_center(abs(index)), index) if index else 0.0)
    return out


def bin_edges() -> list[float]:
    """Upper edge of every bin, ascending; the last is infinite."""
    positive = [_bin_edge(k) for k in range(1, _HALF + 1)]
    return [-x for x in reversed(positive)] + [*positive, math.inf]


def _bin_center(k: int) -> float:
    """|ell| in the middle of the k-th bin above zero, k >= 1."""
    return (_bin_edge(k) + _bin_edge(k + 1)) / 2


def _bin_edge(k: int) -> float:
    """|ell| at the lower edge of the k-th bin above zero, k >= 1."""
    exponent, mantissa = divmod(_FIRST_BIN + k - 1, 1 << _MANTISSA_BITS)
    return 2.0 ** (exponent - 127) * (1 + mantissa / (1 << _MANTISSA_BITS))
