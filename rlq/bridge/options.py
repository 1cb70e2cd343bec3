"""Settings of the bridge as flat fields, for YAML files and command lines."""

from dataclasses import dataclass, field

from .correction import Correction


@dataclass(frozen=True)
class BridgeConfig:
    """One field per field of `Correction`; see there for formulas."""

    bridge_level: str = field(default="token", metadata={"help": "Ratio per token, sequence or geometric mean."})
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

    def correction(self) -> Correction:
        """The validated correction that the fields describe."""
        bounds = (self.bridge_veto_low, self.bridge_veto_high)
        return Correction(
            level=self.bridge_level,  # type: ignore[arg-type]  # validated by Correction
            mode=self.bridge_mode,  # type: ignore[arg-type]
            upper=self.bridge_upper,
            lower=self.bridge_lower,
            veto=None if bounds == (None, None) else bounds,
            denominator=self.bridge_denominator,  # type: ignore[arg-type]
        )
