"""A guard on the mismatch: thresholds, patience and hysteresis over the metrics of a run, actions as data.

`Guard.step` is pure: it takes a state and one step's metrics and returns the next state and the decisions. The caller
carries the decisions out and logs their records.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError
from ..metrics import METRICS
from .correction.correction import Correction

Action = Literal["warn", "tighten", "promote_layers", "fallback_bf16", "stop", "recovered"]
"""`warn` tell the user; `tighten` use `tightened`; `promote_layers` publish the worst layers at a higher
precision from the next version on; `fallback_bf16` publish unquantized weights; `stop` save a checkpoint and end
the run; `recovered` the metric has come back (nothing is undone, the rule starts again from its first action)."""


@dataclass(frozen=True)
class GuardRule:
    """One metric, one limit, and what to do about it, in order of severity.

    Each action is taken after `patience` further steps beyond the limit, the last one again and again. A rule starts
    over once the metric has stayed on the good side of `recover` for `patience` steps; between `recover` and the
    limit nothing is counted, so a metric that hovers at the limit neither escalates faster nor flaps.

    Raises:
        ConfigError: a field is out of range.
    """

    metric: str
    """Name of the metric, without the `rlq/` prefix."""
    limit: float
    """Beyond this the metric counts as bad; NaN always does."""
    actions: tuple[Action, ...]
    """Mildest first."""
    when: Literal["above", "below"] = "above"
    """Which side of the limit is bad."""
    patience: int = 5
    """Bad steps before an action, and good steps before the rule starts over; at least 1."""
    recover: float | None = None
    """The metric is good on the other side of this; None is half the limit (`above`), or halfway from it to 1
    (`below`: those metrics are shares)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(self.actions))
        for action in self.actions:
            if action not in get_args(Action) or action == "recovered":
                known = ", ".join(a for a in get_args(Action) if a != "recovered")
                raise ConfigError(f"guard action {action!r} on {self.metric} is not one of {known}")
        if not self.actions:
            raise ConfigError(f"guard rule on {self.metric} has no action: name at least one, such as 'warn'")
        if self.when not in ("above", "below"):
            raise ConfigError(f"guard when={self.when!r} on {self.metric} is not one of above, below")
        if self.patience < 1:
            raise ConfigError(f"guard patience={self.patience} on {self.metric} must be at least 1 step")
        if self.recover is not None and (
            self.recover > self.limit if self.when == "above" else self.recover < self.limit
        ):
            raise ConfigError(
                f"guard recover={self.recover} on {self.metric} lies on the bad side of limit={self.limit}"
            )

    @property
    def recover_at(self) -> float:
        """Where the metric counts as good again."""
        if self.recover is not None:
            return self.recover
        return self.limit / 2 if self.when == "above" else (self.limit + 1) / 2

    def is_bad(self, value: float) -> bool:
        """Whether a value lies beyond the limit."""
        return math.isnan(value) or (value > self.limit if self.when == "above" else value < self.limit)

    def is_good(self, value: float) -> bool:
        """Whether a value lies on the good side of `recover`."""
        return value <= self.recover_at if self.when == "above" else value >= self.recover_at


DEFAULT_RULES = tuple(
    GuardRule(
        metric.name,
        limit.value,
        limit.actions,  # pyright: ignore[reportArgumentType]  (texts that GuardRule checks)
        when="below" if metric.direction == "higher" else "above",
        patience=limit.patience,
        recover=limit.recover,
    )
    for metric in METRICS.values()
    for limit in metric.limits
)
"""The limits of the metric catalogue. k3 warns above 1e-2: a small FP8 model stays below 1e-3, a deep one has a floor
of up to 1e-2 (`rlq.metrics.METRICS` says where the numbers come from); at 0.1 quantization is left."""


@dataclass(frozen=True)
class RuleState:
    """Counts of one rule."""

    bad: int = 0
    """Bad steps since the last action."""
    good: int = 0
    """Good steps in a row."""
    taken: int = 0
    """Actions taken since the rule last started over."""


@dataclass(frozen=True)
class Decision:
    """One action and what triggered it."""

    step: int
    action: Action
    metric: str
    value: float
    """The metric at this step."""
    limit: float
    """The rule's limit, or for `recovered` the value it came back past."""
    patience: int
    """Steps for which the metric was beyond it."""
    message: str
    """One line, for a log or an alert."""

    def record(self) -> dict[str, float | int | str]:
        """Flat log record, prefixed `guard/`."""
        return {f"guard/{name}": value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Guard:
    """Rules, and the pure transition over them."""

    rules: tuple[GuardRule, ...] = DEFAULT_RULES
    """Independent of each other; several may name one metric."""

    def start(self) -> tuple[RuleState, ...]:
        """State before the first step. States can be compared, and saved with a checkpoint."""
        return tuple(RuleState() for _ in self.rules)

    def step(
        self, state: tuple[RuleState, ...], metrics: Mapping[str, float], step: int
    ) -> tuple[tuple[RuleState, ...], list[Decision]]:
        """Next state and this step's decisions. A rule whose metric is missing stands still.

        Raises:
            ConfigError: the state belongs to another set of rules.
        """
        if len(state) != len(self.rules):
            raise ConfigError(f"guard state has {len(state)} rules, the guard {len(self.rules)}: start anew")
        states: list[RuleState] = []
        decisions: list[Decision] = []
        for rule, before in zip(self.rules, state, strict=True):
            after, decision = before, None
            if rule.metric in metrics:
                after, decision = _advance(rule, before, float(metrics[rule.metric]), step)
            states.append(after)
            decisions += [decision] if decision else []
        return tuple(states), decisions


def _advance(rule: GuardRule, state: RuleState, value: float, step: int) -> tuple[RuleState, Decision | None]:
    if rule.is_bad(value):
        state = RuleState(bad=state.bad + 1, good=0, taken=state.taken)
        if state.bad < rule.patience:
            return state, None
        action = rule.actions[min(state.taken, len(rule.actions) - 1)]
        return RuleState(taken=state.taken + 1), _decision(rule, action, rule.limit, value, step)
    if not rule.is_good(value):
        return dataclasses.replace(state, good=0), None
    state = dataclasses.replace(state, good=state.good + 1)
    if state.good < rule.patience or state == RuleState(good=state.good):
        return state, None
    if not state.taken:
        return RuleState(good=state.good), None
    return RuleState(good=state.good), _decision(rule, "recovered", rule.recover_at, value, step)


def _decision(rule: GuardRule, action: Action, limit: float, value: float, step: int) -> Decision:
    side = rule.when if action != "recovered" else {"above": "below", "below": "above"}[rule.when]
    message = f"step {step}: {action}: {rule.metric} = {value:.4g}, {side} {limit:g} for {rule.patience} steps"
    return Decision(step, action, rule.metric, value, limit, rule.patience, message)


def tightened(correction: Correction) -> Correction:
    """The next stricter correction: half the headroom above 1, a lower bound halfway to 1, a ten times closer veto.

    The result is a correction like any other; applied again and again it tends to weights of at most 1. Mode `none`
    starts truncating at 2.
    """
    veto_low = 1e-4 if correction.veto is None or correction.veto[0] is None else min(0.1, 10 * correction.veto[0])
    veto_high = None if correction.veto is None else correction.veto[1]
    mode = "truncate" if correction.mode == "none" and correction.custom is None else correction.mode
    headroom = min(correction.upper, 3.0) - 1.0
    return dataclasses.replace(
        correction,
        mode=mode,
        upper=2.0 if correction.mode == "none" else 1.0 + headroom / 2,
        lower=None if correction.lower is None else (1.0 + correction.lower) / 2,
        veto=(veto_low, veto_high),
    )
