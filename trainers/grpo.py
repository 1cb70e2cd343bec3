"""GRPO from quantized rollouts: TRL's trainer with a generation seam and a score seam.

What this package takes from TRL beyond its public interface, eight contact points, each pinned by a test in
`tests/unit/learner/test_trl_*.py`. Nothing but this file and `compat.py` reaches for them:

1. `vllm_generation` with `sync_weights` and `generate`, behind `use_vllm` and `vllm_mode` (the generation seam);
2. `_last_loaded_step`, the version that TRL believes to be served;
3. `_generate_and_score_completions` and the keys of the batch it returns (the score seam);
4. `_metrics`, where log entries collect;
5. `_tokenize_prompts`;
6. `get_batch_samples`, `num_iterations` and how often the loader repeats a generation batch (sampling ahead);
7. which arguments TRL passes to the model's backbone (`forward/compact.py` replaces its forward);
8. `import_utils.is_vllm_available` (`compat.py`).

Axes: B completions of a generation batch, T completion tokens (padded).
"""

import time
from itertools import islice
from typing import Any

import torch
from transformers import TrainerCallback

from rlq.bridge import Correction, DistributedReducer, Reducer, correct
from rlq.errors import SamplerError
from rlq.formats.schemes import Scheme
from rlq.types import Sampler

from .compat import GRPOTrainer
from .forward.compact import compact_forward
from .observe.batch import ScoredBatch
from .observe.observer import Observer
from .options import QuantGRPOConfig
from .rollouts.generation import SamplerGeneration
from .rollouts.lookahead import LookAhead


class QuantGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose completions come from quantized samplers and whose loss is corrected for it.

    `samplers` and `correction` come on top of GRPOTrainer's arguments; everything else means what it means there. Per
    token three log-probs exist: `sampler_logprobs` (who acted), `old_logprobs` (learner at the sampled version) and
    `logprobs` (learner now). The loss is weighted by the bridge's w(old_logprobs - sampler_logprobs).

    Args:
        samplers: engine or pool; its scheme says how published weights are quantized. None on ranks other than 0.
        correction: what the bridge does; the default is token truncation at 2 with a veto at 1e-4.
    """

    args: QuantGRPOConfig

    def __init__(self, *args, samplers: Sampler | None, correction: Correction | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.correction = correction or Correction()
        self.stop_token_ids = declared_stop_ids(self.model, self.processing_class)
        # The generation seam: what TRL sets up for a vLLM server, with our object in its place.
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "server", -1
        self.vllm_generation = SamplerGeneration(self, samplers)
        if self.args.compact_buckets:
            one_rank = self.accelerator.num_processes == 1
            width = (lambda: self.vllm_generation.prompt_width) if one_rank else None
            # One micro-batch per generation batch: what is scored is what is learned from, with the same weights.
            once = (
                one_rank
                and self.args.steps_per_generation == 1
                and not self.args.gradient_checkpointing
                and self.args.beta == 0
            )
            compact_forward(self.model, self.args.compact_buckets, width, score_once=once)
        self.add_callback(VersionLag(self))
        several = self.accelerator.num_processes > 1
        self.reducer: Reducer | None = DistributedReducer(device=self.accelerator.device) if several else None
        self.observer: Observer | None = None
        self._look_ahead: LookAhead | None = None

    @property
    def completion_limit(self) -> int:
        """Longest completion in tokens."""
        assert self.args.max_completion_length is not None
        return self.args.max_completion_length

    @property
    def in_training(self) -> bool:
        """True in a training step, False in an evaluation."""
        assert self.model is not None
        return self.model.training

    @property
    def policy(self) -> Any:
        """The model without accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def version(self) -> int:
        """Optimizer steps done."""
        return self.state.global_step

    @property
    def rollout_versions(self) -> list[int]:
        """Versions that sampled the batch taken last, one per completion of all ranks, in rank order."""
        return self.vllm_generation.rollout_versions

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Trainer's own, through an iterator that can say what comes next."""
        if self.args.async_steps:
            if self._look_ahead is None or self._look_ahead.batches is not epoch_iterator:
                assert self.args.steps_per_generation is not None
                self._look_ahead = LookAhead(epoch_iterator, self.args.steps_per_generation * self.num_iterations)
            epoch_iterator = self._look_ahead
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def first_prompts(self, count: int) -> list[list[int]]:
        """Token ids of the first prompts of the training set."""
        dataset: Any = self.train_dataset
        return self._tokenize_prompts([row["prompt"] for row in islice(iter(dataset), count)])[0]

    def upcoming_prompts(self) -> list[list[list[int]]]:
        """Prompt ids of the next `async_steps` generation batches on this rank; fewer at the end of an epoch or run."""
        if self._look_ahead is None:
            return []
        micro_steps = (self.state.max_steps - self.state.global_step) * self.args.gradient_accumulation_steps
        left = -(-micro_steps // self._look_ahead.repeats) - 1
        batches = self._look_ahead.upcoming(min(self.args.async_steps, left))
        return [self._tokenize_prompts([row["prompt"] for row in batch])[0] for batch in batches]

    def log_rlq(self, metrics: dict[str, float]) -> None:
        """Add values, equal on every rank, to the next log entry under `rlq/`."""
        mode = "train" if self.in_training else "eval"
        for name, value in metrics.items():
            self._metrics[mode][f"rlq/{name}"].append(value)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The score seam: replace TRL's ratio by the bridge's weights, and its loss mask by the tokens that stay."""
        if self._look_ahead is not None and self.in_training:
            self._look_ahead.begin()
            self.vllm_generation.begin_batch()
        out = super()._generate_and_score_completions(inputs)
        start = time.perf_counter()
        mask = out["completion_mask"].bool()
        if "tool_mask" in out:
            mask &= out["tool_mask"].bool()
        learner, sampler = out["old_per_token_logps"], out["sampling_per_token_logps"]
        bridge = correct(learner, sampler, mask, self.correction, advantages=out["advantages"], reduce=self.reducer)
        self._refuse_nonfinite(bridge.metrics)
        stay = bridge.finite if self.correction.denominator == "fixed" else bridge.keep
        # A factor of 1 where there is no token: the vespo loss sums the logarithm of the ratio over the padding too.
        out["importance_sampling_ratio"] = torch.where(bridge.finite, bridge.weights, 1.0)
        # TRL multiplies the loss by this mask and attends with completion_mask, so that a token can leave the loss
        # without leaving the context.
        out["tool_mask"] = stay.to(out["completion_mask"].dtype)
        out["num_items_in_batch"] = torch.tensor(bridge.denominator, device=mask.device)
        self.log_rlq(bridge.metrics)
        self.log_rlq({"time/bridge_s": time.perf_counter() - start})
        if self.observer is not None and self.in_training:
            self.observer.scored(ScoredBatch(out, learner, sampler, mask, bridge))
        return out

    def observe(self, observer: Observer) -> None:
        """Let `observer` look at every training batch."""
        self.observer = observer
        self.add_callback(observer)

    def change_scheme(self, scheme: Scheme) -> None:
        """Sample under another scheme from the next publish on."""
        self.vllm_generation.change_scheme(scheme)
        self._last_loaded_step = -1  # publish again even if no step lies in between

    def _refuse_nonfinite(self, metrics: dict[str, float]) -> None:
        bad, good = metrics["nonfinite_tokens"], metrics["tokens"]
        if bad > self.args.max_nonfinite_frac * (bad + good):
            raise SamplerError(
                f"{bad:.0f} of {bad + good:.0f} sampled tokens have no finite log-prob; the sampler or the learner is "
                "broken (raise max_nonfinite_frac only to study it)"
            )


class VersionLag(TrainerCallback):
    """Logs by how many optimizer steps the learner is ahead of the rollouts that it is learning from."""

    def __init__(self, trainer: QuantGRPOTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Runs after the gradients are there and before the weights move."""
        versions = self.trainer.rollout_versions
        self.trainer.log_rlq({"sync/version_lag": state.global_step - sum(versions) / len(versions)})


def declared_stop_ids(model, processing_class) -> tuple[int, ...]:
    """Every end-of-sequence id that the tokenizer or the model's generation config declares, sorted."""
    declared = [getattr(processing_class, "eos_token_id", None), model.generation_config.eos_token_id]
    ids: set[int] = set()
    for value in declared:
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(ids))
