"""Rejection rules: which tokens or sequences are too far from the sampler to learn from.

Axes: B sequences, T completion tokens (padded).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ...errors import ConfigError
from ..ratio import LogRatio

Statistic = Literal["k1", "k2", "k3", "ratio", "abs", "prob_diff"]
Aggregation = Literal["token", "sum", "mean", "max"]
AdvantageSign = Literal["any", "positive", "nonpositive"]

_ON_RATIO = ("k1", "ratio", "abs")


@dataclass(frozen=True)
class RejectRule:
    """Keep what lies in [lower, upper]; drop the token (aggregation `token`) or else the whole sequence.

    Of ell = learner - sampler and rho = exp(ell), with p the probabilities of the sampled token:

    ===========  ==========================  ==========================================  =====================
    statistic    of a token                  over a sequence                             bounds are on
    ===========  ==========================  ==========================================  =====================
    ratio        rho                         exp of the sum, mean or max of ell          rho
    k1           exp(-k1), k1 = -ell         exp(-k1) of the sum, mean or max of k1      rho
    abs          exp(abs(ell))               sum, mean or max                            max(rho, 1 / rho)
    k2           ell^2 / 2                   sum, mean or max                            nats
    k3           rho - 1 - ell               sum, mean or max                            nats
    prob_diff    p_learner - p_sampler       sum, mean or max                            probability
    ===========  ==========================  ==========================================  =====================

    `ratio` and `k1` differ in `max` alone: the largest ratio of a sequence, or its smallest. Sums of logs make
    `sum` the product ratio and `mean` the geometric mean.

    `prob_diff` with a bound per sign of the advantage is DPPO (arXiv 2602.04879). `ratio` with `mean` and `lower` where
    the advantage is not positive is the off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556). k1, k2 and k3 are
    Schulman's estimators of KL(sampler || learner) ("Approximating KL Divergence", 2020).

    Raises:
        ConfigError: no bound, bounds in the wrong order, or a band that drops a token without any mismatch.
    """

    statistic: Statistic
    aggregation: Aggregation = "token"
    """`token` drops tokens; the others drop whole sequences."""
    lower: float | None = None
    """Smallest value kept; None is no lower bound."""
    upper: float | None = None
    """Largest value kept; None is no upper bound."""
    advantage: AdvantageSign = "any"
    """Apply the rule only where the advantage has this sign."""

    def __post_init__(self) -> None:
        for field, choices in (("statistic", Statistic), ("aggregation", Aggregation), ("advantage", AdvantageSign)):
            check_choice(f"reject {field}", getattr(self, field), choices)
        if self.lower is None and self.upper is None:
            raise ConfigError(f"reject rule on {self.statistic} has no bound: set lower, upper, or both")
        lower = -math.inf if self.lower is None else self.lower
        upper = math.inf if self.upper is None else self.upper
        if not lower <= upper:
            raise ConfigError(f"reject rule on {self.statistic}: upper={upper} is below lower={lower}: swap them")
        neutral, scale = (1.0, "the ratio itself, not its log") if self.statistic in _ON_RATIO else (0.0, "nats")
        if self.statistic == "prob_diff":
            scale = "a difference of probabilities"
        if not lower <= neutral <= upper or (self.statistic in _ON_RATIO and lower < 0 and self.lower is not None):
            raise ConfigError(
                f"reject rule on {self.statistic}: the band [{lower}, {upper}] must hold {neutral:g}, the value "
                f"without mismatch; bounds are on {scale}"
            )


@dataclass(frozen=True)
class RuleInputs:
    """What a rule may look at."""

    ratio: LogRatio
    learner_BT: Tensor
    sampler_BT: Tensor
    advantages: Tensor | None
    """(B,) or (B, T); None when the caller has none."""


def check_choice(field: str, value: object, choices: object) -> None:
    """Raise ConfigError unless `value` is one of a Literal's values."""
    if value not in get_args(choices):
        raise ConfigError(f"{field}={value!r} is not one of {', '.join(get_args(choices))}")


def as_rules(rules: object) -> tuple[RejectRule, ...]:
    """Rules from a list of rules or of mappings (as YAML gives them).

    Raises:
        ConfigError: an empty or malformed list; `None` is how rejection is switched off.
    """
    if not isinstance(rules, list | tuple) or not rules:
        raise ConfigError(f"reject={rules!r} must be a non-empty list of rules: write reject=None to switch it off")
    out = []
    for rule in rules:
        if isinstance(rule, dict):
            unknown = set(rule) - set(RejectRule.__dataclass_fields__)
            if unknown or "statistic" not in rule:
                fields = ", ".join(RejectRule.__dataclass_fields__)
                raise ConfigError(f"reject rule {rule!r} has other keys than {fields}, or no statistic")
            rule = RejectRule(**rule)
        if not isinstance(rule, RejectRule):
            raise ConfigError(f"reject rule {rule!r} is neither a RejectRule nor a mapping of its fields")
        out.append(rule)
    return tuple(out)


def outside(rule: RejectRule, inputs: RuleInputs) -> Tensor:
    """(B, T) or (B, 1) bool, True where the rule drops; arbitrary outside the finite tokens."""
    value, logs = _value(rule, inputs)
    drop = torch.zeros_like(value, dtype=torch.bool)
    if rule.upper is not None:
        drop |= value > (_log(rule.upper) if logs else rule.upper)
    if rule.lower is not None:
        drop |= value < (_log(rule.lower) if logs else rule.lower)
    if rule.advantage == "any":
        return drop
    assert inputs.advantages is not None  # `correct` refuses a correction that needs advantages without them
    advantages = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages[:, None]
    return drop & ((advantages > 0) if rule.advantage == "positive" else (advantages <= 0))


def _value(rule: RejectRule, inputs: RuleInputs) -> tuple[Tensor, bool]:
    """The statistic, and whether it is the log of what the bounds are on."""
    ratio, how = inputs.ratio, rule.aggregation
    if rule.statistic == "ratio" or (rule.statistic == "k1" and how != "max"):
        return _aggregate(ratio.exact_BT, how, ratio), True
    if rule.statistic == "k1":
        return -_aggregate(-ratio.exact_BT, "max", ratio), True
    if rule.statistic == "abs":
        per_token = ratio.bounded_BT.abs().exp_()
    elif rule.statistic == "k2":
        per_token = ratio.exact_BT.square().mul_(0.5)
    elif rule.statistic == "k3":
        per_token = torch.expm1(ratio.bounded_BT).sub_(ratio.exact_BT)
    else:
        per_token = prob_diff(inputs.learner_BT, inputs.sampler_BT, ratio)
    return _aggregate(per_token, how, ratio), False


def _aggregate(per_token: Tensor, how: str, ratio: LogRatio) -> Tensor:
    if how == "token":
        return per_token
    if how == "max":
        return torch.where(ratio.finite_BT, per_token, -math.inf).amax(-1, keepdim=True)
    total = torch.where(ratio.finite_BT, per_token, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return total if how == "sum" else total / ratio.tokens_B.clamp(min=1)[:, None]


def prob_diff(learner: Tensor, sampler: Tensor, ratio: LogRatio) -> Tensor:
    """(B, T) p_learner - p_sampler of the sampled token, 0 outside the finite tokens.

    Probabilities are capped at 1, so that a malformed positive log-prob cannot overflow.
    """
    dtype = ratio.exact_BT.dtype
    p = learner.detach().to(dtype).clamp(max=0.0).exp_()
    p -= sampler.detach().to(dtype).clamp(max=0.0).exp_()
    return torch.where(ratio.finite_BT, p, torch.zeros((), dtype=dtype, device=p.device))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
