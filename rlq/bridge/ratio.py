"""The log ratio between learner and sampler, made safe once for everything that follows.

Axes: B sequences, T completion tokens (padded), so `x_BT` is (B, T) and `x_B` is (B,).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log ratios are bounded to +-20 before `exp`: exp(20) = 4.9e8 and its square still fit fp32, exp(89) does not."""

MISSING_LOGPROB = -9999.0
"""Engines write -9999 where a log-prob is missing. It is no number to compute with: such tokens count as non-finite."""

_SUSPECT = 1000.0
"""A log ratio this large, or NaN, is the sign of an unusable log-prob; only then is every token looked at."""


@dataclass(frozen=True)
class LogRatio:
    """Log ratio ell = learner - sampler with everything that is not a finite completion token set to 0."""

    exact_BT: Tensor
    """(B, T) fp32, or fp64 for fp64 inputs. Not bounded; used wherever nothing is exponentiated."""
    bounded_BT: Tensor
    """(B, T) the same clamped to +-`MAX_LOG_RATIO`; the only form that goes into `exp`."""

    rho_BT: Tensor
    """(B, T) exp of the bounded log ratio, 0 outside the finite tokens."""
    mask_BT: Tensor
    """(B, T) bool, as passed."""

    finite_BT: Tensor
    """(B, T) bool: inside the mask, and both log-probs are numbers."""
    tokens_B: Tensor
    """(B,) fp64, finite tokens of each sequence."""

    sum_B: Tensor
    """(B,) fp64, sum of the exact log ratio over a sequence: the log of the sequence's product ratio, not bounded."""
    min: float
    """Smallest exact log ratio, or 0 if every one is above."""
    max: float
    """Largest exact log ratio, or 0 if every one is below."""


def check_inputs(learner_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> None:
    """Refuse inputs from which a ratio cannot be formed honestly.

    Raises:
        ConfigError: log-probs are missing, not floating point, or not (B, T); the mask is not bool; shapes differ.
    """
    for name, tensor in (("learner_logprobs", learner_logprobs), ("sampler_logprobs", sampler_logprobs)):
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{name} is {type(tensor).__name__}, not a tensor: record it (a ratio is never assumed 1)"
            )
        if not tensor.is_floating_point():
            raise ConfigError(f"{name} has dtype {tensor.dtype}: pass floating-point log-probs, one per sampled token")
        if tensor.ndim != 2:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}: pass (batch, completion tokens)")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(f"mask is {kind}, not bool: pass mask.bool(), True on the completion tokens of the loss")
    if not learner_logprobs.shape == sampler_logprobs.shape == mask.shape:
        shapes = [tuple(t.shape) for t in (learner_logprobs, sampler_logprobs, mask)]
        raise ConfigError(f"learner, sampler and mask have shapes {shapes}: align them to the same (batch, tokens)")


def log_ratio(learner_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> LogRatio:
    """Form ell = learner - sampler over the finite tokens of the mask.

    Inputs are upcast before the subtraction (a bf16 difference of -17.3 and -17.25 is all rounding), and the mask is
    applied by selection, so NaN or infinity at a masked place has no effect. A token inside the mask whose log-prob on
    either side is NaN, infinite or `MISSING_LOGPROB` is not finite: it has ell = 0 and leaves every sum.

    Args:
        learner_logprobs: (B, T), any floating dtype, nats.
        sampler_logprobs: (B, T), any floating dtype, nats; processed log-probs of the sampled ids.
        mask: (B, T) bool.

    Raises:
        ConfigError: see `check_inputs`.
    """
    check_inputs(learner_logprobs, sampler_logprobs, mask)
    double = torch.float64 in (learner_logprobs.dtype, sampler_logprobs.dtype)
    dtype = torch.float64 if double else torch.float32
    learner = learner_logprobs.detach().to(dtype)
    sampler = sampler_logprobs.detach().to(dtype)
    zero = torch.zeros((), dtype=dtype, device=learner.device)

    # Selection in place, here and below: on a CPU fresh memory costs as much as the arithmetic.
    exact = learner - sampler
    finite, exact = mask, torch.where(mask, exact, zero, out=exact)
    low, high = _range(exact)
    if not (high < _SUSPECT and low > -_SUSPECT):  # NaN fails too
        finite = mask & (torch.minimum(learner, sampler) > MISSING_LOGPROB) & torch.isfinite(exact)
        exact = torch.where(finite, exact, zero)
        low, high = _range(exact)
    beyond = max(high, -low) > MAX_LOG_RATIO
    bounded = exact.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if beyond else exact
    rho = bounded.exp()
    return LogRatio(
        exact_BT=exact,
        bounded_BT=bounded,
        rho_BT=torch.where(finite, rho, zero, out=rho),
        mask_BT=mask,
        finite_BT=finite,
        tokens_B=finite.sum(-1, dtype=torch.int32).double(),
        sum_B=exact.sum(-1, dtype=torch.float64),
        min=low,
        max=high,
    )


def _range(x: Tensor) -> tuple[float, float]:
    """Smallest and largest value; NaN if there is one, 0 without values."""
    low, high = torch.aminmax(x) if x.numel() else (torch.zeros(()), torch.zeros(()))
    return low.item(), high.item()
