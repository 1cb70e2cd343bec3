"""Settings of the bridge as flat fields, for YAML files and command lines."""

from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from .correction import Correction
from .presets import PRESETS
from .rules import RejectRule, as_rules


@dataclass(frozen=True)
class BridgeConfig:
    """One field per field of `Correction`; see there for formulas.

    With a preset, a field left at its default keeps what the preset has.
    """

    bridge_level: str = field(default="token", metadata={"help": "Ratio per token, sequence, geometric or segment."})
    bridge_mode: str = field(default="truncate", metadata={"help": "truncate, clip, mask or none."})
    bridge_upper: float = field(default=2.0, metadata={"help": "Largest ratio, at least 1."})
    bridge_lower: float | None = field(default=None, metadata={"help": "Smallest ratio, for clip and mask."})
    bridge_veto_low: float | None = field(
        default=1e-4, metadata={"help": "A token below this ratio drops its sequence; none to switch off."}
    )
    bridge_veto_high: float | None = field(
        default=None, metadata={"help": "A token above this ratio drops its sequence."}
    )
    bridge_denominator: str = field(default="fixed", metadata={"help": "Divide by fixed (all) or kept tokens."})
    bridge_preset: str | None = field(
        default=None, metadata={"help": "Start from a preset by name, such as verl/decoupled_token_is."}
    )
    bridge_reject: list[str] | None = field(
        default=None,
        metadata={"help": "Rejection rules, each statistic:aggregation:lower:upper, such as k3:mean::0.01."},
    )
    bridge_normalize: str = field(default="none", metadata={"help": "none, batch or self."})
    bridge_ess_target: float | None = field(
        default=None, metadata={"help": "Choose the cap that keeps this effective sample size, in (0, 1)."}
    )
    bridge_custom: str | None = field(default=None, metadata={"help": "Name given to register_correction."})

    def correction(self) -> Correction:
        """The validated correction that the fields describe.

        Raises:
            ConfigError: as `Correction` does, or a malformed rule.
        """
        veto = (self.bridge_veto_low, self.bridge_veto_high)
        values: dict[str, Any] = {
            "level": self.bridge_level,
            "mode": self.bridge_mode,
            "upper": self.bridge_upper,
            "lower": self.bridge_lower,
            "reject": None if self.bridge_reject is None else as_rules([_rule(text) for text in self.bridge_reject]),
            "veto": None if veto == (None, None) else veto,
            "normalize": self.bridge_normalize,
            "ess_target": self.bridge_ess_target,
            "denominator": self.bridge_denominator,
            "custom": self.bridge_custom,
        }
        if self.bridge_preset is None:
            return Correction(**values)
        default = Correction()
        changed = {name: value for name, value in values.items() if value != getattr(default, name)}
        correction = Correction.preset(self.bridge_preset, **changed)
        if PRESETS[self.bridge_preset].bypass and correction.mode == "none":
            raise ConfigError(
                f"bridge_preset={self.bridge_preset!r} leaves the correction to a PPO ratio against the sampler; this "
                "trainer's ratio is against the learner at the sampled version, so nothing would correct: take a "
                "preset without bypass"
            )
        return correction


def _rule(text: str) -> RejectRule:
    parts = text.split(":")
    if len(parts) != 4:
        raise ConfigError(f"bridge_reject {text!r}: write statistic:aggregation:lower:upper, such as k3:mean::0.01")
    try:
        lower, upper = (float(x) if x else None for x in parts[2:])
    except ValueError:
        raise ConfigError(f"bridge_reject {text!r}: bounds must be numbers or empty, such as k3:mean::0.01") from None
    return RejectRule(parts[0], parts[1], lower, upper)  # type: ignore[arg-type]  # validated by RejectRule
