"""The learner: model, data and rewards from a configuration, training, and what a run leaves behind."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from rlq.bridge import Correction
from rlq.errors import ConfigError, SamplerError
from rlq.formats.schemes import Scheme
from rlq.publish import write_directory
from rlq.types import Sampler

from .checkpoints import CheckpointMarker
from .grpo import QuantGRPOTrainer
from .observe.batch import RewardTap
from .observe.config import ObserveConfig
from .observe.observer import Observer
from .options import QuantGRPOConfig, RunConfig
from .publish.gather import full_weights
from .publish.publisher import Weights, collect
from .tasks import DATASETS, REWARDS
from .tracking import curves, records, wandb_run
from .tracking.callback import RunRecorder, summary_table


@dataclass(frozen=True)
class LearnerPlan:
    """Everything a learner needs, resolved and checked."""

    run: RunConfig
    """What is trained on what."""
    grpo: QuantGRPOConfig
    """TRL's settings; `output_dir` is the run's checkpoint directory."""
    observe: ObserveConfig
    """What to look at besides."""
    scheme: Scheme
    """Scheme of the samplers."""
    correction: Correction
    """What the bridge does."""
    run_dir: Path
    """Absolute run directory."""
    model_path: str
    """Local directory or hub name of the initial policy."""
    resume: Path | None
    """Complete checkpoint to resume from."""
    config: dict[str, Any]
    """The resolved configuration, for wandb."""


def load_dataset(run: RunConfig, seed: int):
    """The training set: generated, a local file or folder, or a hub name.

    Raises:
        ConfigError: it cannot be loaded or has no `prompt` column.
    """
    import datasets

    name = run.dataset_name
    if name in DATASETS:
        data = DATASETS[name](run.dataset_rows, seed)
    elif Path(name).is_file():
        data = datasets.load_dataset(
            Path(name).suffix[1:].replace("jsonl", "json"), data_files=name, split=run.dataset_split
        )
    elif (Path(name) / "dataset_info.json").is_file():
        data = datasets.load_from_disk(name)
    else:
        try:
            data = datasets.load_dataset(name, split=run.dataset_split)
        except (FileNotFoundError, ConnectionError, ValueError) as error:
            raise ConfigError(
                f"dataset {name!r} cannot be loaded ({error}); use {sorted(DATASETS)}, a file or a hub name"
            ) from None
    if "prompt" not in data.column_names:
        raise ConfigError(f"dataset {name!r} has no `prompt` column, only {data.column_names}; rename one to `prompt`")
    return data


def load_rewards(names: list[str]) -> list[Callable]:
    """Reward functions by built-in name or dotted path; ConfigError if one does not exist."""
    functions = []
    for name in names:
        if name in REWARDS:
            functions.append(REWARDS[name])
            continue
        module, _, attribute = name.rpartition(".")
        try:
            functions.append(getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError, ValueError):
            raise ConfigError(
                f"reward {name!r} not found; use {sorted(REWARDS)} or a dotted path such as my_module.my_reward"
            ) from None
    return functions


def build_trainer(plan: LearnerPlan, samplers: Sampler | None) -> QuantGRPOTrainer:
    """Load model, tokenizer, data and rewards, and set the trainer up."""
    if plan.run.learner_num_threads:
        torch.set_num_threads(plan.run.learner_num_threads)
    disable_progress_bar()  # transformers draws one for each 2 MB file
    # fp32 masters: what is published is their bf16 cast.
    model = AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32)
    taps = [RewardTap(function) for function in load_rewards(plan.run.reward_funcs)]
    trainer = QuantGRPOTrainer(
        model=model,
        reward_funcs=list(taps),
        args=plan.grpo,
        train_dataset=load_dataset(plan.run, plan.grpo.seed),
        processing_class=AutoTokenizer.from_pretrained(plan.model_path),
        samplers=samplers,
        correction=plan.correction,
        callbacks=[RunRecorder(plan.run_dir), CheckpointMarker()],
    )
    trainer.observe(Observer(trainer, plan.observe, plan.scheme, plan.run_dir, taps))
    for callback in (PrinterCallback, ProgressCallback):  # rlq has its own display
        trainer.remove_callback(callback)
    return trainer


def train(plan: LearnerPlan, samplers: Sampler | None) -> None:
    """Train, then leave `final/`, `final-<scheme>/`, `curves.png` and a table behind."""
    trainer = build_trainer(plan, samplers)
    main = trainer.accelerator.is_main_process
    if main and "wandb" in (plan.grpo.report_to or ()):
        wandb_run.start(plan.run_dir, plan.run_dir.name, plan.grpo.run_name or plan.run_dir.name, plan.config)
    try:
        trainer.train(resume_from_checkpoint=str(plan.resume) if plan.resume else None)
    finally:
        trainer.vllm_generation.close()
    state, weights = full_weights(trainer, buffers=True), collect(trainer, plan.scheme)
    if main:
        save_final(trainer, plan, state, weights)
        history = [r for r in records.load(plan.run_dir / records.FILE) if "loss" in r]
        curves.plot_curves({plan.run_dir.name: history}, plan.run_dir / "curves.png")
        from rich.console import Console

        Console(width=100).print(summary_table(history))
    trainer.end()
    if trainer.observer is not None and trainer.observer.stopped:
        raise SamplerError(f"the guard ended the run ({trainer.observer.stopped}); resume from its checkpoint")


def save_final(
    trainer: QuantGRPOTrainer, plan: LearnerPlan, state: list[tuple[str, torch.Tensor]], weights: Weights
) -> None:
    """Write the trained policy in bf16 (`state`), and as samplers serve it (`weights`)."""
    final = plan.run_dir / "final"
    bf16 = {name: tensor.to(torch.bfloat16) for name, tensor in state}
    trainer.policy.save_pretrained(final, state_dict=bf16)
    config = json.loads((final / "config.json").read_text()) | {"dtype": "bfloat16"}
    (final / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer: Any = trainer.processing_class
    tokenizer.save_pretrained(final)
    if plan.scheme.weights is not None:
        quantized = plan.run_dir / f"final-{plan.scheme.name}"
        tokenizer.save_pretrained(quantized)
        write_directory(weights.quantize(), quantized, config)
