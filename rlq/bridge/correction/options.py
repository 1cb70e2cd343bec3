"""Settings of the bridge as flat fields, for YAML files and command lines."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ...errors import ConfigError
from .correction import Correction
from .presets import find
from .rules import RejectRule, as_rules

OFF = "none"
"""What switches off a bound, the rules or the ESS target, also those of a preset."""
_VETO = ("bridge_veto_low", "bridge_veto_high")
_CAN_BE_OFF = ("bridge_lower", *_VETO, "bridge_reject", "bridge_ess_target")


@dataclass(frozen=True)
class BridgeConfig:
    """One field per field of `Correction`; see there for formulas.

    None means "not said": the preset's value applies, or the default of `Correction` where no preset is named. A field
    that is said always wins over the preset. `none` switches off what can be off; in a YAML file, so does null.
    """

    bridge_level: str | None = field(default=None, metadata={"help": "Ratio per token, sequence, geometric, segment."})
    bridge_mode: str | None = field(default=None, metadata={"help": "truncate, clip, mask or none."})
    bridge_upper: float | None = field(default=None, metadata={"help": "Largest ratio, at least 1."})
    # A union that ends in str reaches argparse as text, so that `none` is not taken for "not said".
    bridge_lower: float | str | None = field(
        default=None, metadata={"help": "Smallest ratio, for clip and mask; none for no bound."}
    )
    bridge_veto_low: float | str | None = field(
        default=None, metadata={"help": "A token below this ratio drops its sequence; none for no bound."}
    )
    bridge_veto_high: float | str | None = field(
        default=None, metadata={"help": "A token above this ratio drops its sequence; none for no bound."}
    )
    bridge_denominator: str | None = field(default=None, metadata={"help": "Divide by fixed (all) or kept tokens."})
    bridge_preset: str | None = field(
        default=None, metadata={"help": "Start from a preset by name, such as verl/decoupled_token_is."}
    )
    bridge_reject: list[str] | None = field(
        default=None,
        metadata={
            "help": "Rejection rules, each statistic:aggregation:lower:upper, such as k3:mean::0.01; a fifth part, "
            "positive or nonpositive, limits a rule to advantages of that sign. none for no rules."
        },
    )
    bridge_normalize: str | None = field(default=None, metadata={"help": "none, batch or self."})
    bridge_ess_target: float | str | None = field(
        default=None,
        metadata={"help": "Choose the cap that keeps this effective sample size, in (0, 1); none for off."},
    )
    bridge_custom: str | None = field(
        default=None, metadata={"help": "Dotted path of a function of weights, such as my_module.my_weights."}
    )

    def correction(self) -> Correction:
        """The validated correction that the fields describe.

        Raises:
            ConfigError: as `Correction` does, a malformed rule or number.
        """
        preset = None if self.bridge_preset is None else find(self.bridge_preset)
        base = Correction() if preset is None else Correction.preset(self.bridge_preset or "")
        said: dict[str, Any] = {
            name: value
            for name in ("level", "mode", "upper", "normalize", "denominator", "custom")
            if (value := getattr(self, f"bridge_{name}")) is not None
        }
        low, high = base.veto or (None, None)
        veto = (_bound("veto_low", self.bridge_veto_low, low), _bound("veto_high", self.bridge_veto_high, high))
        correction = replace(
            base,
            lower=_bound("lower", self.bridge_lower, base.lower),
            veto=None if veto == (None, None) else veto,
            reject=base.reject if self.bridge_reject is None else _rules(self.bridge_reject),
            ess_target=_bound("ess_target", self.bridge_ess_target, base.ess_target),
            **said,
        )
        if preset is not None and preset.bypass and correction.mode == "none":
            raise ConfigError(
                f"bridge_preset={self.bridge_preset!r} leaves the correction to a PPO ratio against the sampler; this "
                "trainer's ratio is against the learner at the sampled version, so nothing would correct: take a "
                "preset without bypass"
            )
        return correction

    def resolved(self) -> "BridgeConfig":
        """The same correction with every field said that a preset can set; the preset's name stays as a label.

        Raises:
            ConfigError: see `correction`.
        """
        c = self.correction()
        low, high = c.veto or (None, None)
        return replace(
            self,
            bridge_level=c.level,
            bridge_mode=c.mode,
            bridge_upper=c.upper,
            bridge_lower=_said(c.lower),
            bridge_veto_low=_said(low),
            bridge_veto_high=_said(high),
            bridge_denominator=c.denominator,
            bridge_reject=[_text(rule) for rule in c.reject or ()] or [OFF],
            bridge_normalize=c.normalize,
            bridge_ess_target=_said(c.ess_target),
        )

    def record(self) -> dict[str, Any]:
        """What a run writes down: the resolved fields, less those that are not said."""
        return {name: value for name, value in asdict(self.resolved()).items() if value is not None}


def read_nulls(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a YAML file with null as `none` where a field can be off.

    A record of a run from before settings won over a preset holds every field, null for `bridge_custom` too (records
    of today leave it out). With a preset, a field that equaled its default gave way there: it is dropped, so that the
    record means what ran.
    """
    values = {name: OFF if name in _CAN_BE_OFF and value is None else value for name, value in settings.items()}
    complete = all(f.name in settings for f in fields(BridgeConfig))
    if not complete or settings["bridge_preset"] is None or settings["bridge_custom"] is not None:
        return values
    default = BridgeConfig().record() | {"bridge_reject": OFF}
    gave_way = {name for name in default if values[name] == default[name]}
    if not gave_way.issuperset(_VETO):  # the two bounds were one field
        gave_way.difference_update(_VETO)
    return {name: value for name, value in values.items() if name not in gave_way}


def _said(value: float | None) -> float | str:
    return OFF if value is None else value


def _bound(name: str, said: float | str | None, otherwise: float | None) -> float | None:
    if said is None:
        return otherwise
    if str(said).lower() == OFF:
        return None
    try:
        return float(said)
    except ValueError:
        raise ConfigError(f"bridge_{name} {said!r} is neither a number nor {OFF}") from None


def _rules(texts: list[str]) -> tuple[RejectRule, ...] | None:
    return None if texts == [OFF] else as_rules([_rule(text) for text in texts])


def _rule(text: str) -> RejectRule:
    form = "write statistic:aggregation:lower:upper, such as k3:mean::0.01"
    parts = text.split(":")
    if len(parts) not in (4, 5):
        raise ConfigError(f"bridge_reject {text!r}: {form}")
    try:
        lower, upper = (float(x) if x else None for x in parts[2:4])
    except ValueError:
        raise ConfigError(f"bridge_reject {text!r}: bounds must be numbers or empty; {form}") from None
    return RejectRule(parts[0], parts[1], lower, upper, *parts[4:])  # type: ignore[arg-type]  # RejectRule checks


def _text(rule: RejectRule) -> str:
    """The text that `_rule` reads as this rule."""
    bounds = ("" if bound is None else repr(float(bound)) for bound in (rule.lower, rule.upper))
    sign = () if rule.advantage == "any" else (rule.advantage,)
    return ":".join((rule.statistic, rule.aggregation, *bounds, *sign))
