"""What to look at besides training: settings."""

from dataclasses import dataclass, field, replace

from rlq.bridge import DEFAULT_RULES, Correction, GuardRule
from rlq.errors import ConfigError


@dataclass(frozen=True)
class ObserveConfig:
    """What to look at and how often; 0 is never."""

    dump_every: int = field(
        default=0, metadata={"help": "Write rollouts/step-N.parquet every N steps, for rlq replay."}
    )
    breakdown_every: int = field(
        default=0, metadata={"help": "Write breakdown.jsonl and worst_tokens.jsonl every N steps (and wandb tables)."}
    )
    shadow_corrections: list[str] | None = field(
        default=None, metadata={"help": "Presets to evaluate beside the one that trains, such as trl/token_truncate."}
    )
    shadow_every: int = field(default=10, metadata={"help": "Evaluate them every N steps."})
    shadow_parameters: str | None = field(
        default=None,
        metadata={
            "help": "Pattern of the parameters whose policy gradients are compared; default: the final norm's weight."
        },
    )
    gap_every: int = field(
        default=0, metadata={"help": "Attribute the gap to quantization, engine, staleness every N."}
    )
    observe_sequences: int = field(default=64, metadata={"help": "Completions that shadows and attribution look at."})
    guard: str = field(default="warn", metadata={"help": "off, warn, or act (tighten, promote, fall back, stop)."})

    guard_rules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Instead of the default rules: metric:above|below:limit:patience:action+action, "
            "such as sampler_kl_k3:above:0.005:3:warn+fallback_bf16."
        },
    )

    def __post_init__(self) -> None:
        if self.guard not in ("off", "warn", "act"):
            raise ConfigError(f"guard={self.guard!r} is not one of off, warn, act")
        self.shadows()
        self.rules()

    def rules(self) -> tuple[GuardRule, ...]:
        """The guard's rules; with `guard: warn` their only action is a warning."""
        rules = DEFAULT_RULES if self.guard_rules is None else tuple(parse_rule(text) for text in self.guard_rules)
        return rules if self.guard == "act" else tuple(replace(r, actions=("warn",)) for r in rules)

    def shadows(self) -> dict[str, Correction]:
        """Name to correction; ConfigError for an unknown preset."""
        return {name: Correction.preset(name) for name in self.shadow_corrections or ()}


def parse_rule(text: str) -> GuardRule:
    """A rule of the guard from `metric:above|below:limit:patience:action+action`; ConfigError for anything else."""
    parts = text.split(":")
    if len(parts) != 5:
        raise ConfigError(f"guard_rules {text!r}: write metric:above|below:limit:patience:action+action")
    metric, when, limit, patience, actions = parts
    try:
        numbers = float(limit), int(patience)
    except ValueError:
        raise ConfigError(f"guard_rules {text!r}: limit and patience must be numbers") from None
    return GuardRule(metric, numbers[0], tuple(actions.split("+")), when, numbers[1])  # type: ignore[arg-type]
