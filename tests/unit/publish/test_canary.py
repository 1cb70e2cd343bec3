"""The canary: what the learner expects of every sampler, and when it refuses one."""

import math
import threading
from typing import Any

import pytest
import torch
from grpo_steps import build, reference_samplers

from rlq.emulate.probe import Probe, teacher_forced
from rlq.errors import ConfigError, SamplerError
from rlq.formats.schemes import Scheme
from rlq.publish import snapshot
from trainers.options import QuantGRPOConfig
from trainers.publish.canary import NOISE_EVERY, Canary


@pytest.fixture(scope="module")
def samplers():
    return reference_samplers()


def test_the_mean_difference_decides():
    probe = Probe(((1, 2, 3), (4, 5)), ((-1.0, -2.0), (-3.0,)), tolerance=0.1)
    assert probe.check([(-1.1, -2.0), (-3.1,)]) == pytest.approx(0.2 / 3)
    with pytest.raises(SamplerError, match=r"0\.2 nats per token off, more than 0\.1"):
        probe.check([(-1.3, -2.0), (-3.3,)])
    with pytest.raises(SamplerError, match="nan nats"):
        probe.check([(math.nan, -2.0), (-3.0,)])


def test_a_sampler_that_serves_the_version_passes_and_one_with_a_wrong_layer_does_not(samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path, "fp8")
    canary, sampler = Canary(trainer), samplers["fp8"]
    snap = snapshot(trainer.model.named_parameters(), sampler.scheme, 1)
    pending = canary.probe(snap)
    assert pending is not None
    probe = pending.scored()
    assert [len(p) for p in probe.prompts] == [7, 7]
    sampler.install(snap, probe)
    assert sampler.proof["sync/canary_nats"] < 1e-5
    with torch.no_grad():
        sampler.model.model.layers[1].mlp.down_proj.weight.mul_(-1)  # what no digest of the codes would show
    with pytest.raises(SamplerError, match="the canary is"):
        probe.check(teacher_forced(sampler.model, probe.prompts))


def test_what_rounding_alone_can_do_is_tolerated(samplers, tmp_path, monkeypatch):
    trainer, _ = build(samplers, tmp_path, "fp8", canary_tolerance=0.1)
    snaps = [snapshot(trainer.model.named_parameters(), samplers["fp8"].scheme, v) for v in range(NOISE_EVERY + 2)]
    calm = Canary(trainer).probe(snaps[1])
    assert calm is not None
    assert 0.1 < calm.scored().tolerance < 0.1 + 3e-3, "four layers amplify little"
    embeddings = []

    def chaotic(model, prompts):
        embeddings.append(model.get_input_embeddings().weight.clone())
        return [tuple(-1.0 + 0.2 * (len(embeddings) % 2) for _ in prompt[1:]) for prompt in prompts]

    monkeypatch.setattr("trainers.publish.canary.teacher_forced", chaotic)
    canary = Canary(trainer)
    trainer.model.train()
    probes: Any = [canary.probe(snap) for snap in snaps[1:]]
    assert [p.scored().tolerance for p in probes] == pytest.approx([0.1 + 3 * 0.2] * len(probes))
    assert len(embeddings) == len(probes) + 2, "measured when the copy was made, and at version 10"
    logged = trainer._metrics["train"]["rlq/sync/canary_noise_nats"]
    assert logged == pytest.approx([0.2]), "a run that resumes at version 1 has the records of one that does not"
    exact, nudged = embeddings[:2]
    assert 0 < (nudged / exact - 1)[exact != 0].abs().max() <= 1.2e-6
    assert torch.equal(embeddings[2], exact), "the next version is scored as it is"


def test_the_copy_follows_every_version_and_every_scheme(samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path, "fp8")
    canary = Canary(trainer)
    found = []
    for version, scheme in enumerate(("fp8", "fp8", "bf16")):
        with torch.no_grad():
            trainer.model.model.layers[0].mlp.up_proj.weight.mul_(1.05)
        snap = snapshot(trainer.model.named_parameters(), Scheme.preset(scheme), version)
        probe = canary.probe(snap)
        assert probe is not None
        samplers[scheme].install(snap, probe)
        found.append(probe.scored().logprobs)
    assert len(set(found)) == 3


def test_scoring_that_fails_surfaces_in_the_step_that_waits_and_blames_no_sampler(samplers, tmp_path, monkeypatch):
    def broken(model, prompts):
        raise SamplerError("the copy is broken")

    monkeypatch.setattr("trainers.publish.canary.teacher_forced", broken)
    trainer, steps = build(samplers, tmp_path, "fp8")
    with pytest.raises(RuntimeError, match="could not score the canary's prompts: the copy is broken") as error:
        trainer.train()
    assert not isinstance(error.value, SamplerError)
    assert not steps.gradients
    trainer.vllm_generation.close()


def test_the_scores_are_computed_beside_the_install_and_waited_for_by_the_check(samplers, tmp_path, monkeypatch):
    trainer, _ = build(samplers, tmp_path, "fp8")
    sampler, snap = samplers["fp8"], snapshot(trainer.model.named_parameters(), samplers["fp8"].scheme, 1)
    trainer.model.train()
    go = threading.Event()

    def late(model, prompts):
        assert go.wait(30)
        return teacher_forced(model, prompts)

    monkeypatch.setattr("trainers.publish.canary.teacher_forced", late)
    canary = Canary(trainer)
    probe = canary.probe(snap)
    assert probe is not None
    assert len(probe.prompts) == 2, "engines can be asked while the copy is at work"
    canary.log(wait=False)
    assert "rlq/time/canary_s" not in trainer._metrics["train"]
    sampler.install(snap)
    answers = teacher_forced(sampler.model, probe.prompts)
    threading.Timer(0.2, go.set).start()
    assert probe.check(answers) < 1e-5
    canary.log(wait=False)
    assert len(trainer._metrics["train"]["rlq/time/canary_s"]) == 1
    canary.close()


def test_prompts_of_one_token_have_nothing_to_score(samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path, "fp8")
    trainer.train_dataset = [{"prompt": "1"}, {"prompt": "2"}]
    snap = snapshot(trainer.model.named_parameters(), samplers["fp8"].scheme, 1)
    assert Canary(trainer).probe(snap) is None


def test_training_logs_what_was_proved_and_draws_the_same_numbers_without_it(samplers, tmp_path):
    watched, _ = build(samplers, tmp_path, "fp8", canary_prompts=2, max_steps=2)
    watched.train()
    unwatched, _ = build(samplers, tmp_path, "fp8", canary_prompts=0, max_steps=2)
    unwatched.train()
    entry = next(e for e in watched.state.log_history if "rlq/sync/canary_nats" in e)
    assert entry["rlq/sync/canary_nats"] < 1e-5
    assert entry["rlq/sync/tensors"] > 10
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (watched, unwatched)]
    assert losses[0] == losses[1]
    assert not any("rlq/sync/canary_nats" in e for e in unwatched.state.log_history)


def test_settings_that_mean_nothing_are_refused(tmp_path):
    refused: list[dict[str, Any]] = [{"canary_prompts": -1}, {"canary_tolerance": 0.0}]
    for settings in refused:
        with pytest.raises(ConfigError, match="take a count from 0"):
            QuantGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)
