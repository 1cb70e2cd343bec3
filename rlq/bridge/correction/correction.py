"""What a sampler-learner correction is: one frozen dataclass, validated when it is built."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from ...errors import ConfigError
from .custom import load_weights
from .presets import find
from .rules import RejectRule, as_rules, check_choice

Level = Literal["token", "sequence", "geometric", "segment"]
Mode = Literal["none", "truncate", "clip", "mask"]
Normalize = Literal["none", "batch", "self"]
Denominator = Literal["fixed", "kept"]


@dataclass(frozen=True)
class Correction:
    """How a token's loss is weighted for having been sampled by another distribution than the learner's.

    With ell_t = log pi_learner - log pi_sampler, the ratio rho of a token is exp(ell_t) at level `token`,
    exp(sum ell) at level `sequence`, exp(mean ell) at level `geometric` (both the same for every token of the
    sequence), and exp(mean ell) over its own contiguous run of the mask at level `segment` (one turn of a dialogue).
    Every threshold is a bound on rho itself, never on its log. `geometric` is
    the ratio of GSPO (arXiv 2507.18071).

    Raises:
        ConfigError: a field is out of range or two fields contradict each other.
    """

    level: Level = "token"
    """What the ratio is formed over. `sequence` is unbiased, its variance grows with length; `token` trades bias for
    variance."""
    mode: Mode = "truncate"
    """`truncate` min(rho, upper); `clip` rho into [lower, upper]; `mask` rho inside the band, dropped outside;
    `none` weight 1 (measure only, or reject only)."""
    upper: float = 2.0
    """Largest weight, at least 1. Infinity with `truncate` gives plain importance weights."""
    lower: float | None = None
    """Smallest weight, in [0, 1]; None is no lower bound. Only `clip` and `mask` have one."""
    reject: Sequence[RejectRule] | None = None
    """Rules that drop tokens or sequences; all must be passed. Kept as a tuple; mappings, as YAML gives them, do too.
    None is off."""
    veto: tuple[float | None, float | None] | None = (1e-4, None)
    """(low, high) bounds on the ratio of every single token: one token outside drops its sequence. None is off."""
    normalize: Normalize = "none"
    """`batch` divides weights by their mean before anything is dropped (over tokens, or over sequences where a
    sequence has one weight); `self` scales them so that the loss is sum(w x) / sum(w) over the kept tokens."""
    ess_target: float | None = None
    """Choose the cap in [1, upper] as the largest whose weights keep at least this effective sample size, in (0, 1)."""
    denominator: Denominator = "fixed"
    """Tokens the loss is divided by: `fixed` all finite tokens, so that dropping cannot raise the step size of the
    rest; `kept` only the tokens that stay."""
    custom: str | None = None
    """Dotted path of a function, such as `my_module.my_weights`, that computes the weights in place of level and mode;
    see `load_weights`. Only the path is kept, so that a correction can be pickled: each process imports it."""

    def __post_init__(self) -> None:
        check_choice("level", self.level, Level)
        check_choice("mode", self.mode, Mode)
        check_choice("normalize", self.normalize, Normalize)
        check_choice("denominator", self.denominator, Denominator)
        self._check_band()
        if self.veto is not None:
            object.__setattr__(self, "veto", _checked_veto(self.veto))
        if self.reject is not None:
            object.__setattr__(self, "reject", as_rules(self.reject))
        if self.ess_target is not None:
            self._check_ess_target(self.ess_target)
        if self.custom is not None:
            load_weights(self.custom)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A peer's setting by name, such as `verl/decoupled_token_is`, with fields changed on the way.

        Raises:
            ConfigError: unknown name (the message lists close ones) or unknown field.
        """
        unknown = set(changes) - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigError(f"preset {name!r} cannot change {', '.join(sorted(unknown))}: not a field of Correction")
        return cls(**{**find(name).settings, **changes})

    @property
    def per_sequence(self) -> bool:
        """Whether all tokens of a sequence share one weight."""
        return self.custom is None and self.level in ("sequence", "geometric")

    @property
    def needs_advantages(self) -> bool:
        """Whether a rule looks at the sign of an advantage, so that `correct` must be given them."""
        return any(rule.advantage != "any" for rule in self.reject or ())

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
            raise ConfigError(f"lower={self.lower} has no effect with mode={self.mode!r}: use mode='clip' or drop it")

    def _check_ess_target(self, target: float) -> None:
        if not 0.0 < target < 1.0:
            raise ConfigError(f"ess_target={target} must lie in (0, 1): it is a share of the tokens")
        if self.mode not in ("truncate", "clip") or self.custom is not None:
            raise ConfigError("ess_target chooses a cap: use it with mode='truncate' or mode='clip'")


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
