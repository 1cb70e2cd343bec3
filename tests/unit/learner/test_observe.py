"""Observers and the guard in a real trainer: what they write, that they change nothing, and what the guard does."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grpo_steps import build, reference_samplers

from rlq.bridge import Correction, Guard, GuardRule, correct, read_rollouts
from rlq.errors import ConfigError
from rlq.formats.modules import fused_siblings
from rlq.formats.schemes import Scheme
from trainers.observe.batch import RewardTap
from trainers.observe.config import ObserveConfig
from trainers.observe.guard_actions import without_worst_modules
from trainers.observe.observer import Observer
from trainers.twin import differentiable_score

FP8 = Scheme.preset("fp8")
EVERYTHING = ObserveConfig(
    dump_every=1,
    breakdown_every=1,
    shadow_corrections=["trl/token_truncate", "verl/decoupled_seq_is"],
    shadow_every=1,
    gap_every=1,
)


@pytest.fixture(scope="module")
def samplers():
    return reference_samplers()


def run(samplers, tmp_path: Path, config: ObserveConfig | None, rules: tuple[GuardRule, ...] = (), **settings):
    """Train an FP8 run with an observer; returns the trainer."""
    trainer, _ = build(samplers, tmp_path / "out", scheme="fp8", **settings)
    taps = [RewardTap(function) for function in trainer.reward_funcs]
    trainer.reward_funcs = list(taps)
    if config is not None:
        observer = Observer(trainer, config, FP8, tmp_path, taps)
        if rules:
            observer.guard.guard = Guard(rules=rules)
            observer.guard.state = observer.guard.guard.start()
        trainer.observe(observer)
    trainer.train()
    return trainer


@pytest.mark.parametrize("pattern", [None, r"layers\.3\."])
def test_shadow_cosines_are_between_gradients_of_the_named_parameters(samplers, tmp_path, pattern):
    name, other = "rejecting", Correction(mode="mask", lower=0.98, upper=1.02)
    trainer, steps = build(samplers, tmp_path / "out", scheme="fp8", learning_rate=0.0)
    config = ObserveConfig(shadow_every=1, shadow_parameters=pattern)
    observer = Observer(trainer, config, FP8, tmp_path, [])
    observer.shadows.corrections = {name: other}
    trainer.observe(observer)
    trainer.train()
    batch, parameters = steps.batches[0][0], dict(trainer.model.named_parameters())
    chosen = [p for n, p in parameters.items() if (n == "model.norm.weight" if pattern is None else ".3." in n)]
    assert len(chosen) == (1 if pattern is None else 9)
    gradients = []
    for correction in (trainer.correction, other):
        mask = batch["completion_mask"].bool()
        out = correct(batch["old_per_token_logps"], batch["sampling_per_token_logps"], mask, correction)
        log_p, _ = differentiable_score(trainer.model, batch, temperature=1.0)
        loss = (out.weights * batch["advantages"][:, None] * log_p).sum() / out.denominator
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, chosen)]))
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    expected = float(torch.cosine_similarity(*gradients, dim=0))
    assert abs(expected) < 0.9999, "the two corrections have to differ here"
    assert log[f"rlq/shadow/{name}/cosine"] == pytest.approx(expected, abs=1e-4)
    assert log[f"rlq/shadow/{name}/norm_ratio"] == pytest.approx(
        float(gradients[1].norm() / gradients[0].norm()), rel=1e-3
    )


def test_a_shadow_pattern_that_matches_nothing_is_refused(samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path)
    with pytest.raises(ConfigError, match="matches no parameter"):
        Observer(trainer, ObserveConfig(shadow_parameters="nothing_like_it"), FP8, tmp_path, [])


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_observers_write_what_they_saw_and_change_nothing(samplers, tmp_path):
    (tmp_path / "plain").mkdir()
    plain = run(samplers, tmp_path / "plain", None, max_steps=2)
    watched = run(samplers, tmp_path, EVERYTHING, max_steps=2)
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)
    logs = [log for log in watched.state.log_history if "loss" in log]
    for log in logs:
        parts = [log[f"rlq/gap/{part}"] for part in ("stale", "quant", "engine")]
        # All 8 completions are in the slice and the lag is 0, so the parts sum to the sampler's k3.
        assert sum(parts) == pytest.approx(log["rlq/sampler_kl_k3"], rel=1e-3)
        assert log["rlq/gap/quant"] == pytest.approx(log["rlq/sampler_kl_k3"], rel=0.05), "the sampler is the emulation"
        assert log["rlq/shadow/trl/token_truncate/cosine"] == pytest.approx(1.0)
        assert log["rlq/audit/kept_seqs"] == 8.0
    dumped = list(read_rollouts(tmp_path / "rollouts"))
    assert [int(d.step[0]) for d in dumped if d.step is not None] == [0, 1]
    first = dumped[0]
    assert first.old_logprobs is not None
    assert first.reward is not None
    ell = (first.old_logprobs - first.sampler_logprobs)[first.mask].double()
    assert float((torch.expm1(ell) - ell).mean()) == pytest.approx(logs[0]["rlq/sampler_kl_k3"], rel=1e-4)
    assert float(first.reward.double().mean()) == pytest.approx(logs[0]["reward"])
    for axis in ("position", "sampler_prob", "entropy", "advantage_sign", "length"):
        table = [r for r in rows(tmp_path / "breakdown.jsonl") if r["step"] == 0 and r["axis"] == axis]
        assert sum(r["tokens"] for r in table) == logs[0]["rlq/tokens"], axis
    worst = rows(tmp_path / "worst_tokens.jsonl")[0]
    assert abs(worst["log_ratio"]) == pytest.approx(logs[0]["rlq/logratio_abs_max"], rel=1e-5)


def test_staleness_shows_when_the_learner_is_ahead(samplers, tmp_path):
    trainer = run(
        samplers, tmp_path, ObserveConfig(gap_every=1), max_steps=2, steps_per_generation=2, learning_rate=1e-3
    )
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["rlq/sync/version_lag"] == 0.0
    assert logs[1]["rlq/sync/version_lag"] == 1.0
    assert abs(logs[0]["rlq/gap/stale"]) < 1e-8
    assert "rlq/gap/stale" not in logs[1], "attribution is taken once per generation batch"


def always(action: str, metric: str = "sampler_kl_k3") -> tuple[GuardRule, ...]:
    return (GuardRule(metric, -1.0, (action,), patience=1, recover=-2.0),)  # type: ignore[arg-type]


def test_the_guard_tightens_the_correction(samplers, tmp_path):
    trainer = run(samplers, tmp_path, ObserveConfig(guard="act"), always("tighten"), max_steps=2)
    assert trainer.correction.upper == pytest.approx(1.25), "head-room 1 halved twice"
    taken = rows(tmp_path / "guard.jsonl")
    assert [r["guard/step"] for r in taken] == [0, 1]
    assert {r["guard/metric"] for r in taken} == {"sampler_kl_k3"}


def test_the_guard_falls_back_to_bf16_and_the_ratio_is_one_again(samplers, tmp_path):
    # A tiny learning rate leaves the fp32 masters on the bf16 grid that they start from.
    settings = {"max_steps": 2, "learning_rate": 1e-9}
    trainer = run(samplers, tmp_path, ObserveConfig(guard="act"), always("fallback_bf16"), **settings)
    first, second = [log for log in trainer.state.log_history if "loss" in log]
    assert first["rlq/sampler_kl_k3"] > 1e-5
    assert second["rlq/sampler_kl_k3"] < 1e-5
    assert trainer.observer.guard.scheme.name == "bf16"
    samplers["fp8"].change_scheme(FP8)


def test_the_guard_promotes_the_worst_layers(samplers, tmp_path):
    trainer = run(samplers, tmp_path, ObserveConfig(guard="act"), always("promote_layers"), max_steps=2)
    promoted = set(trainer.observer.guard.scheme.ignore) - set(FP8.ignore)
    assert promoted
    assert all(set(fused_siblings(module)) <= promoted for module in promoted), "fused layers move together"
    samplers["fp8"].change_scheme(FP8)


def test_promotion_takes_the_largest_relative_error(samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path, scheme="fp8")
    target = trainer.model.get_parameter("model.layers.2.mlp.down_proj.weight")
    with torch.no_grad():  # 68 lies half-way between the codes 64 and 72 when the row's largest value is 448
        target.fill_(68.0)
        target[:, 0] = 448.0
    scheme = without_worst_modules(trainer, FP8, fraction=0.01)
    assert set(scheme.ignore) - set(FP8.ignore) == {"model.layers.2.mlp.down_proj"}


def test_the_guard_stops_with_a_checkpoint(samplers, tmp_path):
    trainer = run(samplers, tmp_path, ObserveConfig(guard="act"), always("stop"), max_steps=5, save_strategy="steps")
    assert trainer.state.global_step == 1
    assert (tmp_path / "out/checkpoint-1").is_dir()
    assert trainer.observer.stopped.startswith("step 0: stop: sampler_kl_k3")


def test_the_guard_that_warns_does_nothing_else(samplers, tmp_path, caplog):
    nan_rules = tuple(replace(rule, actions=("warn",)) for rule in always("stop"))
    trainer = run(samplers, tmp_path, ObserveConfig(guard="warn"), nan_rules, max_steps=2)
    assert trainer.state.global_step == 2
    assert "guard: step 0: warn: sampler_kl_k3" in caplog.text


def test_rules_can_be_written_as_settings():
    config = ObserveConfig(guard="act", guard_rules=["ess_token:below:0.9:3:warn+stop"])
    assert config.rules() == (GuardRule("ess_token", 0.9, ("warn", "stop"), when="below", patience=3),)
    assert ObserveConfig(guard="warn", guard_rules=config.guard_rules).rules()[0].actions == ("warn",)


def test_the_guard_writes_json_that_every_reader_accepts(samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path, scheme="fp8")
    observer = Observer(trainer, ObserveConfig(guard="warn"), FP8, tmp_path, [])
    observer.guard.guard = Guard(rules=always("warn"))
    observer.guard.state = observer.guard.guard.start()
    observer.guard.step({"sampler_kl_k3": math.nan})
    (line,) = (tmp_path / "guard.jsonl").read_text().splitlines()
    assert "NaN" not in line
    assert json.loads(line)["guard/value"] is None


def test_default_rules_are_quiet_on_a_healthy_run(samplers, tmp_path):
    run(samplers, tmp_path, ObserveConfig(guard="act"), max_steps=2)
    assert not (tmp_path / "guard.jsonl").exists()


def test_a_reward_tap_remembers_and_keeps_the_name():
    def reward(completions, **kwargs):
        return [1.0, None]

    tap = RewardTap(reward)
    assert tap(["a", "b"]) == [1.0, None]
    assert vars(tap)["__name__"] == "reward"
    assert tap.values[0] == 1.0
    assert math.isnan(tap.values[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guard_rules": ["sampler_kl_k3:above:0.1"]}, "write metric:above"),
        ({"guard_rules": ["sampler_kl_k3:above:high:1:warn"]}, "limit and patience must be numbers"),
        ({"guard_rules": ["sampler_kl_k3:above:0.1:1:panic"]}, "guard action 'panic'"),
        ({"guard": "on"}, "guard='on' is not one of off, warn, act"),
        ({"shadow_corrections": ["trl/tokn"]}, "trl/tokn"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ObserveConfig(**settings)
