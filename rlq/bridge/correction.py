"""What a sampler-learner correction is: one frozen dataclass, validated when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "clip", "mask"]
Denominator = Literal["fixed", "kept"]


@dataclass(frozen=True)
class Correction:
    """How a token's loss is weighted for having been sampled by another distribution than the learner's.

    With ell_t = log pi_learner - log pi_sampler, the ratio rho of a token is exp(ell_t) at level ``token``,
    exp(sum_t ell_t) at level ``sequence`` and exp(mean_t ell_t) at level ``geometric`` (the same for every token of the
    sequence). Every threshold is a bound on rho itself, never on its log.

    Raises:
        ConfigError: a field is out of range or two fields contradict each other.
    """

    level: Level = "token"
    """Over what the ratio is formed. ``sequence`` is unbiased and explodes with length; ``token`` is the usual trade."""

    mode: Mode = "truncate"
    """``truncate`` min(rho, upper); ``clip`` rho into [lower, upper]; ``mask`` rho inside the band, dropped outside;
    ``none`` weight 1 (measure only, or reject only)."""

    upper: float = 2.0
    """Largest weight, at least 1. Infinity with ``truncate`` gives plain importance weights."""

    lower: float | None = None
    """Smallest weight, in [0, 1]; None is no lower bound. Only ``clip`` and ``mask`` have one."""

    veto: tuple[float | None, float | None] | None = (1e-4, None)
    """(low, high) bounds on the ratio of every single token: one token outside drops its whole sequence. None is off."""

    denominator: Denominator = "fixed"
    """Tokens the loss is divided by: ``fixed`` all finite tokens, so that dropping cannot raise the step size of the
    rest; ``kept`` only the tokens that stay."""

    def __post_init__(self) -> None:
        _check_choice("level", self.level, Level)
        _check_choice("mode", self.mode, Mode)
        _check_choice("denominator", self.denominator, Denominator)
        self._check_band()
        if self.veto is not None:
            object.__setattr__(self, "veto", _checked_veto(self.veto))

    def _check_band(self) -> None:
        if self.lower is not None and self.lower > self.upper:
            raise ConfigError(f"upper={self.upper} is below lower={self.lower}: swap them")
        if not self.upper >= 1.0:
            raise ConfigError(f"upper={self.upper} must be at least 1: it bounds the ratio itself, not its log")
        if self.lower is None:
            return
        if not 0.0 <= self.lower <= 1.0:
            raise ConfigError(f"lower={self.lower} must lie in [0, 1]: it bounds the ratio itself, not its log")
        if self.mode not in ("clip", "mask"):
            raise ConfigError(
                f"lower={self.lower} has no effect with mode={self.mode!r}: use mode='clip' or drop lower"
            )


def _check_choice(field: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{field}={value!r} is not one of {', '.join(get_args(choices))}")


def _checked_veto(veto: object) -> tuple[float | None, float | None]:
    if not isinstance(veto, tuple | list) or len(veto) != 2:
        raise ConfigError(f"veto={veto!r} must be (low, high) token ratios, either of them None")
    low, high = veto
    if low is None and high is None:
        raise ConfigError("veto=(None, None) vetoes nothing: write veto=None")
    if low is not None and not 0.0 < low < 1.0:
        raise ConfigError(f"veto low={low} must lie in (0, 1): it bounds the ratio itself, not its log")
    if high is not None and not (high > 1.0 and math.isfinite(high)):
        raise ConfigError(f"veto high={high} must be finite and above 1: it bounds the ratio itself, not its log")
    return low, high
