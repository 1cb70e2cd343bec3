"""Static activation scales: what the learner's linears read on prompts of the training set, at every publish."""

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from rlq.calibrate import input_amax
from rlq.schemes import Scheme

if TYPE_CHECKING:
    from .grpo import QuantGRPOTrainer

LONGEST = 512
"""Tokens of a prompt that are looked at."""


def first_prompts(trainer: "QuantGRPOTrainer", count: int, longest: int) -> list[list[int]]:
    """Token ids of the first prompts of the training set, each cut to `longest`."""
    dataset: Any = trainer.train_dataset
    rows = [row["prompt"] for row in islice(iter(dataset), count)]
    return [prompt[:longest] for prompt in trainer._tokenize_prompts(rows)[0]]


def calibrate(trainer: "QuantGRPOTrainer", scheme: Scheme) -> dict[str, float] | None:
    """Largest magnitude of each linear's input under the learner as it is; None if `scheme` has no static scales.

    The same prompts every time, so that a resumed run publishes what it would have published. All ranks enter, because
    a sharded model computes on all of them.

    Raises:
        ConfigError: an input that is not finite.
    """
    if not scheme.calibrated:
        return None
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    prompts = first_prompts(trainer, trainer.args.calibration_prompts, LONGEST)
    training = model.training
    model.eval()
    try:
        return input_amax(model, (torch.tensor([prompt], device=trainer.accelerator.device) for prompt in prompts))
    finally:
        model.train(training)
