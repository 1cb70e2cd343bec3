"""The guard as a state machine: patience, escalation, hysteresis, records."""

import json
import math

import pytest

from rlq.bridge import Correction, Guard, GuardRule, tightened
from rlq.errors import ConfigError

LADDER = ("warn", "tighten", "fallback_bf16")


def play(rule, values):
    """Actions by step for a series of metric values."""
    guard = Guard((rule,))
    state, out = guard.start(), {}
    for step, value in enumerate(values):
        state, decisions = guard.step(state, {rule.metric: value}, step)
        out |= {d.step: d.action for d in decisions}
    return out


def test_actions_come_in_order_after_patience_and_the_last_repeats():
    rule = GuardRule("kl", 0.1, LADDER, patience=3)
    expected = {2: "warn", 5: "tighten", 8: "fallback_bf16", 11: "fallback_bf16"}
    assert play(rule, [0.2] * 12) == expected


def test_a_single_spike_does_nothing():
    assert play(GuardRule("kl", 0.1, LADDER, patience=2), [0.0, 9.0, 0.0, 0.0, 9.0, 0.0, 0.0] * 5) == {}


def test_hovering_at_the_limit_neither_flaps_nor_recovers():
    # Between recover (0.05) and the limit (0.1) nothing is counted: one action ladder, no "recovered" in between.
    rule = GuardRule("kl", 0.1, LADDER, patience=2)
    actions = play(rule, [0.11, 0.09] * 12)
    assert list(actions.values()) == [*LADDER, "fallback_bf16", "fallback_bf16", "fallback_bf16"]


def test_recovery_takes_patience_is_reported_once_and_starts_over():
    rule = GuardRule("kl", 0.1, LADDER, patience=2)
    actions = play(rule, [0.2, 0.2, 0.04, 0.2, 0.04, 0.04, 0.04, 0.04, 0.2, 0.2])
    assert actions == {1: "warn", 5: "recovered", 9: "warn"}


def test_below_rules_and_nan():
    assert play(GuardRule("ess", 0.5, ("warn",), when="below", patience=1), [0.9, 0.4, 0.6, 0.8]) == {
        1: "warn",
        3: "recovered",
    }
    assert play(GuardRule("kl", 0.1, ("stop",), patience=1), [math.nan]) == {0: "stop"}


def test_missing_metric_stands_still_and_state_is_plain_data():
    rule = GuardRule("kl", 0.1, ("warn",), patience=2)
    guard = Guard((rule,))
    state, _ = guard.step(guard.start(), {"kl": 1.0}, 0)
    assert guard.step(state, {"other": 1.0}, 1) == (state, [])
    _, decisions = guard.step(state, {"kl": 1.0}, 2)
    record = decisions[0].record()
    assert record["guard/action"] == "warn"
    assert (record["guard/metric"], record["guard/value"], record["guard/limit"]) == ("kl", 1.0, 0.1)
    assert "kl = 1, above 0.1 for 2 steps" in json.loads(json.dumps(record))["guard/message"]


def test_default_rules_leave_a_healthy_run_alone_and_stop_a_collapsing_one():
    healthy = {"sampler_kl_k3": 8e-4, "ess_token": 0.998, "clip_frac_high": 1e-4, "kept_token_frac": 1.0}
    healthy |= {"nonfinite_tokens": 0, "sync/version_lag": 1}
    guard = Guard()
    state = guard.start()
    for step in range(50):
        state, decisions = guard.step(state, healthy, step)
        assert decisions == []
    actions = []
    for step in range(50, 60):
        state, decisions = guard.step(state, healthy | {"sampler_kl_k3": 0.5, "ess_token": 0.2}, step)
        actions += [d.action for d in decisions]
    assert {"warn", "fallback_bf16", "stop"} <= set(actions)


@pytest.mark.parametrize(
    "fields",
    [
        {"actions": ()},
        {"actions": ("panic",)},
        {"actions": ("recovered",)},
        {"patience": 0},
        {"when": "over"},
        {"recover": 0.2},
    ],
)
def test_rules_that_cannot_work_are_refused(fields):
    with pytest.raises(ConfigError):
        GuardRule(**({"metric": "kl", "limit": 0.1, "actions": ("warn",)} | fields))
    with pytest.raises(ConfigError, match="start anew"):
        Guard().step((), {}, 0)


def test_tightening_shrinks_towards_weights_of_one():
    correction = Correction()
    uppers = []
    for _ in range(5):
        correction = tightened(correction)
        uppers.append(correction.upper)
    assert uppers == [1.5, 1.25, 1.125, 1.0625, 1.03125]
    assert correction.veto == (0.1, None)
    assert tightened(Correction(mode="mask", lower=0.5, upper=5.0)).lower == 0.75
    assert tightened(Correction.preset("rlq/none")).mode == "truncate"
    assert tightened(Correction(upper=math.inf)).upper == 2.0
