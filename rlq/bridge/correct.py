"""`correct`: from two log-probs and a mask to weights, the tokens that stay, and metrics.

Axes: B sequences, T completion tokens (padded).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from .correction.correction import Correction
from .correction.rules import RuleInputs
from .correction.weights import apply_correction
from .metrics.summary import RawSums, raw_sums, summarize
from .metrics.sums import BridgeSums
from .ratio import log_ratio
from .reduce import Reducer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BridgeOutput:
    """What `correct` returns. Nothing here carries a gradient."""

    weights: Tensor
    """(B, T) fp32 (fp64 for fp64 inputs), detached; 0 outside `keep`."""
    keep: Tensor
    """(B, T) bool, tokens that stay in the loss: the mask less non-finite, masked-out, rejected and vetoed tokens."""
    finite: Tensor
    """(B, T) bool, tokens of the mask with two finite log-probs; a `fixed` denominator counts them."""
    denominator: float
    """Tokens to divide the summed loss by: `finite` (fixed) or `keep` (kept), over all ranks with a reducer.
    At least 1, so that a batch that lost every token has loss 0 and gradient 0 rather than NaN."""
    log_ratio: Tensor
    """(B, T) learner minus sampler, bounded to +-`MAX_LOG_RATIO`, 0 outside `finite`."""
    upper: float
    """Upper bound in effect: the correction's own, or the cap that `ess_target` chose."""
    sums: BridgeSums
    """Additive summary of this rank's batch; `merge` it over micro-batches. Not yet reduced over ranks."""
    metrics: dict[str, float]
    """`METRIC_NAMES` to values, over all ranks when a reducer is given."""


@torch.no_grad()
def correct(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    correction: Correction,
    *,
    advantages: Tensor | None = None,
    reduce: Reducer | None = None,
) -> BridgeOutput:
    """Correction weights, kept tokens and metrics of one batch of rollouts.

    rho = exp(clamp(level(ell), +-20)) with ell = learner - sampler; see `Correction` for levels, modes and drops.
    Token truncation is TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    a report without an arXiv number); the token mask is IcePop (Ring-1T, arXiv 2510.18855).

    Args:
        learner_logprobs: (B, T), any floating dtype; log-probs under the learner. A gradient it carries is ignored.
        sampler_logprobs: (B, T), any floating dtype; log-probs of the same ids under what sampled them.
        mask: (B, T) bool, True on completion tokens. What lies outside it never matters, NaN included.
        correction: how tokens are weighted and dropped.
        advantages: (B,) or (B, T); needed where `correction.needs_advantages`.
        reduce: combines sums over the ranks that share the batch; None means this is the whole batch.

    Raises:
        ConfigError: shapes, dtypes or a missing tensor, see `check_inputs`.
    """
    only = {"": correction}
    return correct_all(learner_logprobs, sampler_logprobs, mask, only, advantages=advantages, reduce=reduce)[""]


@torch.no_grad()
def correct_all(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    corrections: Mapping[str, Correction],
    *,
    advantages: Tensor | None = None,
    reduce: Reducer | None = None,
) -> dict[str, BridgeOutput]:
    """`correct` for several corrections of the same batch; what they share is computed once.

    Args:
        learner_logprobs: (B, T), see `correct`.
        sampler_logprobs: (B, T), see `correct`.
        mask: (B, T) bool.
        corrections: name to correction.
        advantages: (B,) or (B, T).
        reduce: combines sums over the ranks that share the batch.

    Raises:
        ConfigError: see `correct`.
    """
    ratio = log_ratio(learner_logprobs, sampler_logprobs, mask)
    _check_advantages(advantages, mask, corrections)
    inputs = RuleInputs(ratio, learner_logprobs, sampler_logprobs, advantages)
    raw = raw_sums(inputs)
    return {name: _output(inputs, raw, correction, reduce) for name, correction in corrections.items()}


def _check_advantages(advantages: Tensor | None, mask: Tensor, corrections: Mapping[str, Correction]) -> None:
    if advantages is None:
        needing = [name or "the correction" for name, each in corrections.items() if each.needs_advantages]
        if needing:
            raise ConfigError(f"{needing[0]} rejects by the sign of the advantage: pass advantages to correct")
    elif advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ConfigError(f"advantages have shape {tuple(advantages.shape)}: pass (batch,) or (batch, tokens)")


def _output(inputs: RuleInputs, raw: RawSums, correction: Correction, reduce: Reducer | None) -> BridgeOutput:
    ratio = inputs.ratio
    applied = apply_correction(inputs, correction, reduce)
    sums = summarize(ratio, raw, applied)
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
        upper=applied.upper,
        sums=sums,
        metrics=total.metrics(),
    )
