"""Sampling ahead: which batches are asked for when, by which version, and that 0 steps ahead changes nothing."""

import threading
from collections import defaultdict

import pytest
import torch
from grpo_steps import BATCH, GROUP, build, reference_samplers
from transformers import TrainerCallback

from rlq.errors import ConfigError, SamplerError
from trainers.observe.config import ObserveConfig
from trainers.observe.observer import Observer
from trainers.options import QuantGRPOConfig
from trainers.rollouts.lookahead import LookAhead


@pytest.fixture(scope="module")
def samplers():
    return reference_samplers()


# ---- the iterator


def test_it_yields_what_it_reads_and_names_what_follows():
    ahead = LookAhead(iter("aabbcc"), repeats=2)
    seen = [next(ahead), next(ahead)]
    ahead.begin()
    assert ahead.upcoming(1) == ["b"]
    assert ahead.upcoming(5) == ["b", "c"]
    seen.append(next(ahead))
    ahead.begin()
    assert ahead.upcoming(1) == ["c"]
    assert [*seen, *ahead] == list("aabbcc")


def test_micro_batches_that_were_already_handed_out_still_count_as_upcoming():
    # An optimizer step of four micro-batches takes two generation batches at once.
    ahead = LookAhead(iter("aabbccdd"), repeats=2)
    assert [next(ahead) for _ in range(4)] == list("aabb")
    ahead.begin()
    assert ahead.upcoming(2) == ["b", "c"]
    ahead.begin()
    assert ahead.upcoming(2) == ["c", "d"]


# ---- the trainer


class Log:
    """Wraps a sampler and notes what happens to it, in order."""

    def __init__(self, sampler):
        self.sampler, self.scheme, self.events, self.fail_at = sampler, sampler.scheme, [], 0
        self.shipped, self.proof = [], {}

    def ship(self, snap):
        self.shipped.append(snap.version)

    def install(self, snap, probe=None):
        self.events.append(f"install {snap.version}")
        return self.sampler.install(snap, probe)

    def interrupt(self, version):
        self.events.append(f"interrupt {version}")

    def generate(self, requests, sampling, version):
        self.events.append(f"generate {version}")
        if len(self.events) == self.fail_at:
            raise SamplerError("the sampler broke")
        return self.sampler.generate(requests, sampling, version)


def run(samplers, path, max_steps=4, **settings):
    trainer, steps = build(samplers, path, max_steps=max_steps, **settings)
    trainer.vllm_generation.publisher.samplers = log = Log(trainer.vllm_generation.publisher.samplers)
    return trainer, steps, log


def test_order_of_installs_and_batches(samplers, tmp_path):
    events = {}
    lags = {}
    for k in (0, 1, 2):
        trainer, _, log = run(samplers, tmp_path, async_steps=k)
        trainer.train()
        trainer.vllm_generation.close()
        events[k] = log.events
        lags[k] = [r["rlq/sync/version_lag"] for r in trainer.state.log_history if "loss" in r]
    assert events[0] == [f"{what} {v}" for v in range(4) for what in ("install", "generate")]
    assert ", ".join(events[1]) == (
        "install 0, generate 0, generate 0, install 1, generate 1, install 2, generate 2, install 3"
    )
    assert ", ".join(events[2]) == (
        "install 0, generate 0, generate 0, generate 0, install 1, generate 1, install 2, install 3"
    )
    assert lags == {0: [0, 0, 0, 0], 1: [0, 1, 1, 1], 2: [0, 1, 2, 2]}


def test_batches_are_those_of_a_run_that_does_not_look_ahead(samplers, tmp_path):
    prompts = {}
    for k in (0, 2):
        trainer, steps, _ = run(samplers, tmp_path, async_steps=k, gradient_accumulation_steps=2, max_steps=6)
        trainer.train()
        prompts[k] = [sorted(map(tuple, b["prompt_ids"].tolist())) for step in steps.batches for b in step]
    assert prompts[0] == prompts[2]
    assert len(prompts[0]) == 12


def test_two_calls_at_one_version_draw_from_two_streams(samplers, tmp_path):
    trainer, _, _ = run(samplers, tmp_path, async_steps=2)
    seeds = []
    inner = trainer.vllm_generation.publisher.samplers.sampler
    original = inner.generate
    inner.generate = lambda requests, sampling, version: (
        seeds.extend(r.seed for r in requests) or original(requests, sampling, version)
    )
    trainer.train()
    assert len(seeds) == len(set(seeds)) == 4 * BATCH // 4


def test_the_learner_waits_for_a_batch_and_sees_its_error(samplers, tmp_path):
    trainer, _, log = run(samplers, tmp_path, async_steps=1)
    log.fail_at = 3  # the batch that was asked for ahead
    with pytest.raises(SamplerError, match="the sampler broke"):
        trainer.train()
    trainer.vllm_generation.close()
    assert trainer.state.global_step == 1


def test_evaluations_between_steps_are_sampled_by_the_version_of_their_step(samplers, tmp_path):
    """They neither take nor disturb the batch that was asked for ahead."""
    settings = {"eval_rows": 2, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": BATCH}
    trainer, _, log = run(samplers, tmp_path, async_steps=1, **settings)
    trainer.train()
    lags = [r["rlq/sync/version_lag"] for r in trainer.state.log_history if "loss" in r]
    assert lags == [0, 1, 1, 1]
    at = [i for i, event in enumerate(log.events) if event == "install 2"]
    assert log.events[at[0] - 1 : at[0] + 3] == ["generate 1", "install 2", "generate 2", "generate 2"]


def test_other_prompts_than_announced_are_refused(samplers, tmp_path, monkeypatch):
    trainer, _, _ = run(samplers, tmp_path, async_steps=1)
    tokenize = trainer._tokenize_prompts
    monkeypatch.setattr(
        trainer, "upcoming_prompts", lambda: [tokenize([row["prompt"] for row in trainer.train_dataset])[0][:BATCH]]
    )
    with pytest.raises(SamplerError, match="other prompts than it announced"):
        trainer.train()


def test_a_published_version_does_not_move_with_the_learner(samplers, tmp_path):
    """The learner trains in place while its last version waits to be installed."""
    trainer, _, log = run(samplers, tmp_path)
    held = []
    log.install = lambda snap, probe=None: held.append(snap) or log.sampler.install(snap)
    trainer.model.to(torch.bfloat16)  # a cast to bf16 is no copy
    trainer.vllm_generation.sync_weights()
    before = {name: tensor.clone() for name, tensor in held[0].tensors.items()}
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in held[0].tensors.items())


class OnStep(TrainerCallback):
    """Calls a function at every optimizer step."""

    def __init__(self, call):
        self.call = call

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.call()


class Interrupted(Log):
    """Samples ahead one group of each batch, and no more, until it is interrupted."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.interrupts: dict[int, threading.Event] = defaultdict(threading.Event)
        self.seeds: list[list[int]] = []
        self.refuse: int | None = None

    def generate(self, requests, sampling, version):
        rollouts = super().generate(requests, sampling, version)
        self.seeds.append([r.seed for r in requests])
        if len(self.events) == 2 or len(requests) < BATCH // GROUP:
            return rollouts
        assert self.interrupts[version].wait(30)
        return rollouts[:GROUP]

    def install(self, snap, probe=None):
        if snap.version == self.refuse:
            raise SamplerError("it broke")
        return super().install(snap, probe)

    def interrupt(self, version):
        assert self.shipped[-1] == version + 1
        super().interrupt(version)
        self.interrupts[version].set()


class Cut(Interrupted):
    """Cuts through a group instead of between two."""

    def generate(self, requests, sampling, version):
        rollouts = super().generate(requests, sampling, version)
        return rollouts if len(self.seeds) == 1 else rollouts[: GROUP - 1]


def test_in_flight_batches_are_finished_by_the_version_that_cuts_them_short(samplers, tmp_path):
    trainer, _, _ = run(samplers, tmp_path, async_steps=1, async_in_flight="abort", logging_steps=1)
    log = trainer.vllm_generation.publisher.samplers = Interrupted(trainer.vllm_generation.publisher.samplers.sampler)
    sampled_by = []
    trainer.add_callback(OnStep(lambda: sampled_by.append(trainer.vllm_generation.rollout_versions)))
    trainer.train()
    trainer.vllm_generation.close()
    assert sampled_by == [[0] * BATCH] + [[v] * GROUP + [v + 1] * GROUP for v in range(3)]
    assert [r["rlq/sync/version_lag"] for r in trainer.state.log_history if "loss" in r] == [0, 0.5, 0.5, 0.5]
    assert [e for e in log.events if not e.startswith("interrupt")] == [
        *("install 0", "generate 0", "generate 0"),
        *("install 1", "generate 1", "generate 1"),
        *("install 2", "generate 2", "generate 2"),
        *("install 3", "generate 3"),
    ]
    assert log.seeds[2] == log.seeds[1][1:], "the prompt that was not complete, with the seeds that it had"


def test_an_install_that_fails_leaves_nobody_waiting_for_what_was_cut_short(samplers, tmp_path):
    trainer, _, _ = run(samplers, tmp_path, async_steps=1, async_in_flight="abort")
    log = trainer.vllm_generation.publisher.samplers = Interrupted(trainer.vllm_generation.publisher.samplers.sampler)
    log.refuse = 1
    with pytest.raises(SamplerError, match="it broke"):
        trainer.train()
    trainer.vllm_generation.close()


def test_an_incomplete_group_is_refused_even_from_who_was_interrupted(samplers, tmp_path):
    trainer, _, _ = run(samplers, tmp_path, async_steps=1, async_in_flight="abort")
    trainer.vllm_generation.publisher.samplers = Cut(trainer.vllm_generation.publisher.samplers.sampler)
    with pytest.raises(SamplerError, match="4 completions were requested, 3 came back; groups are all or nothing"):
        trainer.train()
    trainer.vllm_generation.close()


def test_refusals(samplers, tmp_path):
    with pytest.raises(ConfigError, match="async_in_flight is 'drop'; use finish or abort"):
        QuantGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, async_in_flight="drop")
    with pytest.raises(ConfigError, match="async_steps=-1"):
        QuantGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, async_steps=-1)
    trainer, _, log = run(samplers, tmp_path, async_steps=1)
    with pytest.raises(ConfigError, match="gap_every"):
        Observer(trainer, ObserveConfig(gap_every=1), log.scheme, tmp_path, [])
