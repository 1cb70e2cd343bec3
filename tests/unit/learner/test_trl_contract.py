"""The seams of TRL that the trainer stands on. When a TRL upgrade moves one of them, this file fails and says which.

Real optimizer steps on a CPU: the shipped model learns from a transformers sampler in the same process, and gradients
are compared with the formula written out here. What TRL looks like is in test_trl_seams.py.
Axes: B completions, T completion tokens (padded).
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo_steps import BATCH, EOS, GROUP, LENGTH, MODEL, THREE, TOKENIZER, build, reference_samplers
from transformers import AutoModelForCausalLM

from rlq.bridge import Correction, LogRatio, correct
from rlq.errors import SamplerError
from rlq.publish import tensor_digest
from rlq.types import Rollout, Sampling
from samplers.testing.reference import TransformersSampler
from trainers.checkpoints import CheckpointMarker, resolve_resume
from trainers.compat import GRPOTrainer
from trainers.tracking import records
from trainers.tracking.callback import RunRecorder

# Losses that TRL knows and that read the ratio as a factor; vespo reads its logarithm and has a test of its own.
LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo")


@pytest.fixture(scope="module")
def samplers() -> dict[str, TransformersSampler]:
    return reference_samplers()


@pytest.fixture
def make(samplers, tmp_path):
    return functools.partial(build, samplers, tmp_path)


@pytest.fixture(scope="module")
def stepped(samplers, tmp_path_factory):
    """A trainer after one step, and the batch of that step, for direct calls of its loss."""
    trainer, steps = build(samplers, tmp_path_factory.mktemp("stepped"))
    trainer.train()
    return trainer, steps.batches[0][0]


def one_step(make, **arguments) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Gradients, batch and log entry of one optimizer step on one micro-batch."""
    trainer, steps = make(**arguments)
    trainer.train()
    ((batch,),) = steps.batches
    return steps.gradients[0], batch, trainer.state.log_history[0]


def formula(
    batch: dict[str, Any], weights_BT: torch.Tensor, denominator: Any, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Gradient of -sum(w A log pi) / denominator at the initial weights, in plain torch."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]
    logits_BTV = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1] / temperature
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    (-(weights_BT * batch["advantages"][:, None] * logprobs_BT).sum() / denominator).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Equal up to the order of fp32 sums, measured against the largest gradient of each tensor."""
    assert a.keys() == b.keys()
    for name in a:
        scale = float(b[name].abs().max())
        assert scale > 0, name
        assert float((a[name] - b[name]).abs().max()) < 1e-4 * scale, name


def constant(value: float) -> Correction:
    """A correction that gives every token the weight `value`: 0, 0.5 or 1."""
    return Correction(custom=f"{__name__}.{CONSTANTS[value].__name__}", veto=None)


def nothing(ratio: LogRatio) -> torch.Tensor:
    return torch.zeros_like(ratio.exact_BT)


def half(ratio: LogRatio) -> torch.Tensor:
    return torch.full_like(ratio.exact_BT, 0.5)


def whole(ratio: LogRatio) -> torch.Tensor:
    return torch.ones_like(ratio.exact_BT)


CONSTANTS = {0.0: nothing, 0.5: half, 1.0: whole}


def shifted(where: Callable[[int, int], bool], by: float) -> Callable[[list[Rollout]], list[Rollout]]:
    """Add `by` to the sampler's log-prob of token t of rollout b wherever `where(b, t)`."""

    def edit(rollouts: list[Rollout]) -> list[Rollout]:
        return [
            replace(r, logprobs=r.logprobs + np.array([by * where(b, t) for t in range(len(r.logprobs))], np.float32))
            for b, r in enumerate(rollouts)
        ]

    return edit


def test_the_batch_holds_what_the_score_seam_reads_and_writes(make):
    trainer, _ = make()
    rows = [trainer.train_dataset[i // GROUP] for i in range(BATCH)]
    trainer.model.train()
    plain = GRPOTrainer._generate_and_score_completions(trainer, rows)
    needed = {
        "completion_mask",
        "old_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
        "num_items_in_batch",
        "advantages",
    }
    assert needed <= plain.keys()
    assert "tool_mask" not in plain  # ours is the only one when no tools are used
    tokens = plain["completion_mask"].shape
    assert tokens[0] == BATCH
    for name in needed - {"num_items_in_batch", "advantages"}:
        assert plain[name].shape == tokens, name
    assert plain["num_items_in_batch"] == plain["completion_mask"].sum()
    ours = trainer._generate_and_score_completions(rows)
    assert set(ours) == set(plain) | {"tool_mask"}
    assert ours["tool_mask"].shape == ours["importance_sampling_ratio"].shape == ours["completion_mask"].shape


@pytest.mark.parametrize("preset", ["prime-rl/dppo", "deepseek/off_policy_sequence_mask"])
def test_a_preset_that_looks_at_advantages_runs(make, preset):
    correction = Correction.preset(preset)
    _, batch, log = one_step(make, edit=shifted(lambda b, t: True, by=1.0), correction=correction)
    scores = batch["old_per_token_logps"], batch["sampling_per_token_logps"], batch["completion_mask"].bool()
    expected = correct(*scores, correction, advantages=batch["advantages"])
    assert torch.equal(batch["importance_sampling_ratio"][expected.finite], expected.weights[expected.finite])
    dropped = (expected.finite & ~expected.keep).any(-1)
    assert dropped.any()
    assert (batch["advantages"][dropped] <= 0).all()  # what the learner finds less likely, and should
    assert log["rlq/kept_token_frac"] < 1


# ---- factors of the loss


def loss_gradients(stepped, batch: dict[str, Any], loss_type: str) -> dict[str, torch.Tensor]:
    """Gradients of TRL's loss on a batch."""
    trainer, _ = stepped
    trainer.loss_type = loss_type
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_ratio_and_mask_are_factors_of_every_loss(stepped, loss_type):
    _, batch = stepped
    assert all(gradient.any() for gradient in loss_gradients(stepped, batch, loss_type).values())
    for key in ("importance_sampling_ratio", "tool_mask"):
        without = loss_gradients(stepped, batch | {key: torch.zeros_like(batch[key])}, loss_type)
        assert not any(gradient.any() for gradient in without.values())


def test_vespo_sees_a_ratio_of_one_wherever_there_is_no_token(stepped):
    # It sums the logarithm of the ratio over the padding too, where a 0 would count as a ratio of e^-18.
    _, batch = stepped
    padding = ~batch["completion_mask"].bool()
    assert padding.any()
    ones = torch.where(padding, 1.0, batch["importance_sampling_ratio"])
    ours = loss_gradients(stepped, batch, "vespo")
    assert_close(ours, loss_gradients(stepped, batch | {"importance_sampling_ratio": ones}, "vespo"))


# ---- gradients


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_identity_scheme_at_lag_0_is_on_policy(make, temperature):
    # The shipped weights are bf16 numbers, so that sampler and learner hold the same ones: only rounding is left.
    gradients, batch, log = one_step(make, temperature=temperature)
    assert log["rlq/logratio_abs_max"] < 1e-4
    assert log["rlq/sync/version_lag"] == 0
    mask = batch["completion_mask"].float()
    assert log["rlq/tokens"] == mask.sum() == batch["num_items_in_batch"]
    assert_close(gradients, formula(batch, mask, mask.sum(), temperature))


def test_a_quantized_step_is_weighted_token_by_token(make):
    gradients, batch, log = one_step(make, scheme="fp8")
    ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
    weights = ratio.clamp(max=2.0) * batch["completion_mask"]
    assert 1e-3 < log["rlq/logratio_abs_max"] < 1.0  # quantization is there, and small
    assert float((weights - batch["completion_mask"]).abs().max()) > 1e-3
    assert_close(gradients, formula(batch, weights, batch["completion_mask"].sum()))


def test_weights_of_0_stop_learning_and_weights_of_a_half_halve_it(make):
    zero, half, one = (one_step(make, scheme="fp8", correction=constant(w))[0] for w in (0.0, 0.5, 1.0))
    assert all(not gradient.any() for gradient in zero.values())
    assert all(torch.equal(2 * half[name], one[name]) for name in one)
    assert any(gradient.any() for gradient in one.values())


@pytest.mark.parametrize("value", [math.nan, -math.inf, -9999.0])
def test_a_nonfinite_token_leaves_loss_and_denominator_and_is_counted(make, value):
    def edit(rollouts):
        logprobs = rollouts[0].logprobs.copy()
        logprobs[1] = value
        return [replace(rollouts[0], logprobs=logprobs), *rollouts[1:]]

    gradients, batch, log = one_step(make, edit=edit, max_nonfinite_frac=0.5)
    sampler = batch["sampling_per_token_logps"]
    stay = batch["completion_mask"].bool() & sampler.isfinite() & (sampler > -9999)
    tokens = int(batch["completion_mask"].sum())
    assert stay.sum() == tokens - 1 == batch["num_items_in_batch"]
    assert (log["rlq/nonfinite_tokens"], log["rlq/tokens"]) == (1, tokens - 1)
    assert math.isfinite(log["loss"])
    assert_close(gradients, formula(batch, stay.float(), tokens - 1))


def test_too_many_nonfinite_tokens_stop_the_run(make):
    def edit(rollouts):
        return [replace(rollouts[0], logprobs=rollouts[0].logprobs * math.nan), *rollouts[1:]]

    trainer, steps = make(edit=edit)
    with pytest.raises(SamplerError, match=r"^\d of \d+ sampled tokens have no finite log-prob; .*broken") as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert not steps.gradients


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
@pytest.mark.parametrize("denominator", ["fixed", "kept"])
def test_the_denominator_is_all_finite_tokens_or_those_that_stay(make, denominator, loss_type):
    # The second token of every completion gets a ratio of e^-2, outside the band.
    band = Correction(mode="mask", lower=0.5, upper=2.0, veto=None, denominator=denominator)
    edit = shifted(lambda b, t: t == 1, by=2.0)
    gradients, batch, log = one_step(make, edit=edit, correction=band, loss_type=loss_type)
    stay = batch["completion_mask"].clone()
    stay[:, 1] = 0
    tokens = int(batch["completion_mask"].sum())
    expected = {"fixed": tokens, "kept": tokens - BATCH}[denominator]
    assert batch["num_items_in_batch"] == expected
    assert log["rlq/mask_frac"] == pytest.approx(BATCH / tokens)
    assert_close(gradients, formula(batch, stay.float(), expected))


def test_a_vetoed_sequence_leaves_the_loss_whole(make):
    gradients, batch, log = one_step(make, edit=shifted(lambda b, t: (b, t) == (0, 2), by=12.0))
    ratio = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
    stay = batch["completion_mask"] * (ratio.amin(1, keepdim=True) > math.log(1e-4))
    assert log["rlq/veto_seq_frac"] == pytest.approx(1 / BATCH)
    assert stay.any(1).sum() == BATCH - 1
    assert_close(gradients, formula(batch, stay.float(), batch["completion_mask"].sum()))


@pytest.mark.parametrize("name", ["prime-rl/dppo", "deepseek/off_policy_sequence_mask"])
def test_presets_that_reject_by_the_sign_of_the_advantage_train(make, name):
    # Every other token was far likelier under the sampler of a bad sequence: what these presets reject, and only there.
    edit = shifted(lambda b, t: b % 2 == 0 and t < 4, by=4.0)
    correction = Correction.preset(name)
    gradients, batch, log = one_step(make, edit=edit, correction=correction)
    learner, sampler = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
    advantages, mask = batch["advantages"], batch["completion_mask"].bool()
    assert (advantages < 0).any()
    assert (advantages > 0).any()
    out = correct(learner, sampler, mask, correction, advantages=advantages)
    flipped = correct(learner, sampler, mask, correction, advantages=-advantages)
    assert not torch.equal(out.keep, flipped.keep), "the sign has to matter here"
    assert log["rlq/kept_token_frac"] == pytest.approx(float(out.keep.sum() / mask.sum()))
    assert_close(gradients, formula(batch, out.weights, torch.tensor(out.denominator)))


@pytest.mark.parametrize("size", [4, 2])
def test_a_batch_is_the_sum_of_its_micro_batches(make, size):
    whole, batch, log = one_step(make, scheme="fp8")
    trainer, steps = make(scheme="fp8", per_device_train_batch_size=size, gradient_accumulation_steps=BATCH // size)
    trainer.train()
    (parts,) = steps.batches
    assert len(parts) == BATCH // size
    assert sum(int(part["completion_mask"].sum()) for part in parts) == batch["completion_mask"].sum()
    assert_close(steps.gradients[0], whole)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(log["loss"], abs=1e-4)  # logged with 4 decimals
    assert trainer.state.log_history[0]["rlq/ess_seq"] == pytest.approx(log["rlq/ess_seq"])


def test_one_publish_serves_several_steps_and_the_lag_is_logged(make):
    trainer, _ = make(per_device_train_batch_size=4, steps_per_generation=2, max_steps=4)
    trainer.train()
    assert trainer.vllm_generation.publisher.samplers.installed == [0, 2]
    assert [log["rlq/sync/version_lag"] for log in trainer.state.log_history[:4]] == [0, 1, 0, 1]
    # Off-policy by one step, the ratio of old to sampler log-probs stays that of the version that sampled.
    assert all(log["rlq/logratio_abs_max"] < 0.1 for log in trainer.state.log_history[:4:2])


# ---- completions


def ended(batch: dict[str, Any]) -> torch.Tensor:
    """(B,) bool: the last token of the completion is an end token."""
    ids = batch["completion_ids"]
    lengths = ((ids != TOKENIZER.pad_token_id).sum(1) - 1).clamp(min=0)
    return torch.isin(ids[torch.arange(len(ids)), lengths], torch.tensor([EOS, THREE]))


def test_a_completion_cut_at_the_limit_is_learned_from(make):
    gradients, batch, log = one_step(make, max_completion_length=4)
    done, mask = ended(batch), batch["completion_mask"].float()
    assert 0 < done.sum() < BATCH
    assert mask[~done].all()  # cut: every place holds a token that counts
    assert log["completions/clipped_ratio"] == pytest.approx(1 - float(done.float().mean()))
    assert log["rlq/tokens"] == mask.sum()
    assert_close(gradients, formula(batch, mask, mask.sum()))


def test_a_cut_completion_leaves_the_loss_when_trl_is_told_so(make):
    gradients, batch, log = one_step(make, max_completion_length=4, mask_truncated_completions=True)
    done, mask = ended(batch), batch["completion_mask"].float()
    assert 0 < done.sum() < BATCH
    assert mask.any(1).tolist() == done.tolist()
    assert log["rlq/tokens"] == batch["num_items_in_batch"] == mask.sum()
    assert_close(gradients, formula(batch, mask, mask.sum()))


def test_every_declared_end_token_ends_a_completion_and_stays_in_it(make):
    trainer, steps = make()
    assert trainer.stop_token_ids == (EOS, THREE)
    assert sorted(trainer.eos_token_ids) == [EOS, THREE]  # TRL's own list, which counts clipped completions
    trainer.train()
    ((batch,),) = steps.batches
    ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
    stops = torch.isin(ids, torch.tensor([EOS, THREE])) & mask
    assert stops.sum() == ended(batch).sum()  # none in the middle of a completion
    assert {EOS, THREE} == set(ids[stops].tolist())
    assert batch["sampling_per_token_logps"][stops].all()  # a log-prob of its own, where padding has 0
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 1 - float(ended(batch).float().mean())


def test_the_models_own_sampling_defaults_never_reach_the_sampler(make):
    trainer, _ = make()
    trainer.model.generation_config.update(temperature=0.1, top_k=2, top_p=0.5, do_sample=True)
    trainer.train()
    assert trainer.vllm_generation.publisher.samplers.asked == [Sampling(1.0, LENGTH, (EOS, THREE))]


@pytest.mark.parametrize("fault", [{"version": 7}, {"scheme": "fp8"}], ids=str)
def test_a_stale_rollout_stops_the_run_before_the_first_step(make, fault):
    trainer, steps = make(edit=lambda rollouts: [*rollouts[:-1], replace(rollouts[-1], **fault)])
    with pytest.raises(SamplerError, match="stale rollouts never reach the loss"):
        trainer.train()
    assert not steps.gradients


# ---- resume


def comparable(log: dict[str, Any]) -> dict[str, Any]:
    """A log entry without what a clock measured, and without what a publish says of itself: an evaluation at the same
    version may have done it before the step."""
    return {k: v for k, v in log.items() if not re.search(r"time|_s$|_per_s|per_second|sync/(?!version_lag)", k)}


@pytest.mark.parametrize("eval_rows", [0, 2], ids=["train", "train and evaluate"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(samplers, tmp_path, capsys, eval_rows):
    settings: dict[str, Any] = {"scheme": "fp8", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    if eval_rows:
        settings |= {"eval_rows": eval_rows, "eval_strategy": "steps", "eval_steps": 2}
        settings |= {"per_device_eval_batch_size": BATCH}

    def run(output: Path, resume: Path | None) -> tuple[Any, list[dict[str, Any]]]:
        callbacks = [RunRecorder(output), CheckpointMarker()]
        trainer, _ = build(samplers, output, callbacks=callbacks, **settings)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return trainer, records.load(output / records.FILE)

    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole, logs = run(tmp_path / "whole", None)
    torch.manual_seed(123)  # whatever the process drew before it resumed must not matter
    checkpoint = resolve_resume(str(tmp_path / "whole" / "checkpoint-2"), tmp_path)
    resumed, logs_again = run(tmp_path / "resumed", checkpoint)
    assert [log["step"] for log in logs if "loss" in log] == [1, 2, 3, 4]
    assert [log["step"] for log in logs_again if "loss" in log] == [3, 4]
    assert [comparable(log) for log in logs if log["step"] > 2] == [comparable(log) for log in logs_again]
    weights = [tensor_digest(dict(t.model.state_dict())) for t in (whole, resumed)]
    assert weights[0] == weights[1]
    assert resolve_resume("true", tmp_path / "resumed") == tmp_path / "resumed" / "checkpoint-4"
    assert len(capsys.readouterr().out.splitlines()) == 6  # one line per step
