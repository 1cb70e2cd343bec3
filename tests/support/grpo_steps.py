"""Real optimizer steps on a CPU for tests: the shipped model learns from a transformers sampler in the same process."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from rlq.bridge import Correction
from rlq.emulate.probe import ScoreCheck
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot
from rlq.types import InstallReport, Request, Rollout, Sampling
from samplers.testing.reference import TransformersSampler
from trainers.grpo import QuantGRPOTrainer
from trainers.options import QuantGRPOConfig
from trainers.tasks import sort_digits_dataset

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "sort_digits"
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
# Two end tokens: one of the two prompts of the first batch holds a 3 and the other does not, so that lengths differ.
EOS, THREE = TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("3")
BATCH, GROUP, LENGTH = 8, 4, 8


def token_sum(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between almost any two completions, so that every group has advantages."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class Edited:
    """A sampler whose rollouts pass through `edit`; equal weights, schemes, prompts and seeds draw once."""

    drawn: dict[tuple, list[Rollout]] = {}  # noqa: RUF012  (shared on purpose)

    def __init__(self, sampler: TransformersSampler, edit: Callable[[list[Rollout]], list[Rollout]] = lambda r: r):
        self.sampler, self.scheme, self.edit = sampler, sampler.scheme, edit
        self.digest = ""
        self.proof: dict[str, float] = {}
        self.installed: list[int] = []
        self.asked: list[Sampling] = []

    def ship(self, snap: Snapshot) -> None:
        self.sampler.ship(snap)

    def install(self, snap: Snapshot, probe: ScoreCheck | None = None) -> InstallReport:
        report = self.sampler.install(snap, probe)
        self.proof = self.sampler.proof
        self.digest = snap.digest
        self.installed.append(snap.version)
        return report

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        self.asked.append(sampling)
        key = (self.digest, self.scheme, tuple(requests), sampling, version)
        if key not in self.drawn:
            self.drawn[key] = self.sampler.generate(requests, sampling, version)
        return self.edit(self.drawn[key])

    def interrupt(self, version: int) -> None:
        self.sampler.interrupt(version)

    def change_scheme(self, scheme: Scheme) -> None:
        self.sampler.change_scheme(scheme)
        self.scheme = scheme

    def close(self) -> None:
        pass


class Steps(TrainerCallback):
    """What each optimizer step saw: gradients, and the micro-batches they came from."""

    def __init__(self):
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.batches: list[list[dict[str, Any]]] = []
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        named = self.trainer.model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named})
        self.batches.append([dict(batch) for batch in self.trainer._buffered_inputs])


def reference_samplers() -> dict[str, TransformersSampler]:
    """One identity and one FP8 sampler of the shipped model."""
    config = json.loads((MODEL / "config.json").read_text())
    return {name: TransformersSampler(config, Scheme.preset(name)) for name in ("bf16", "fp8")}


def build(
    samplers: dict[str, TransformersSampler],
    output_dir: Path,
    scheme: str = "bf16",
    edit: Callable[[list[Rollout]], list[Rollout]] = lambda r: r,
    correction: Correction | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    eval_rows: int = 0,
    **settings,
) -> tuple[Any, Steps]:
    """A trainer of the shipped model and the record of its steps; `settings` are those of QuantGRPOConfig."""
    fixed = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": BATCH,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "max_steps": 1,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # gradients are compared, so nothing may rescale them
        "save_strategy": "no",
        "seed": 0,
    }
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = [EOS, THREE]
    steps = Steps()
    trainer = QuantGRPOTrainer(
        model=model,
        reward_funcs=[token_sum],
        args=QuantGRPOConfig(**(fixed | settings)),
        train_dataset=sort_digits_dataset(32, seed=0),
        eval_dataset=sort_digits_dataset(eval_rows, seed=9) if eval_rows else None,
        processing_class=TOKENIZER,
        samplers=Edited(samplers[scheme], edit),
        correction=correction,
        callbacks=[steps, *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    steps.trainer = trainer
    return trainer, steps
