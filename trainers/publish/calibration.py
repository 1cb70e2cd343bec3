"""Static scales: what the learner's linears read and its attention caches on prompts of the training set, each time."""

from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import torch

from rlq.formats.schemes import Scheme
from rlq.recipes.base import needs
from rlq.recipes.statistics import Statistics, collect

if TYPE_CHECKING:
    from ..grpo import QuantGRPOTrainer

LONGEST = 512
"""Tokens of a prompt that are looked at."""


def first_prompts(trainer: "QuantGRPOTrainer", count: int, longest: int) -> list[list[int]]:
    """Token ids of the first prompts of the training set, each cut to `longest`."""
    dataset: Any = trainer.train_dataset
    rows = [row["prompt"] for row in islice(iter(dataset), count)]
    return [prompt[:longest] for prompt in trainer._tokenize_prompts(rows)[0]]


def calibrate(trainer: "QuantGRPOTrainer", scheme: Scheme) -> Statistics | None:
    """Statistics of the learner as it is, as `snapshot` takes them; None if neither scheme nor recipes read any.

    The same prompts every time, so that a resumed run publishes what it would have published. All ranks enter, because
    a sharded model computes on all of them.

    Raises:
        ConfigError: something that is not finite.
    """
    wanted = needs(scheme)
    if not wanted:
        return None
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    prompts = first_prompts(trainer, trainer.args.calibration_prompts, LONGEST)
    by_length = groupby(sorted(prompts, key=len), len)  # a batch without padding
    batches = [torch.tensor(list(group), device=trainer.accelerator.device) for _, group in by_length]
    training = model.training
    model.eval()
    try:
        return collect(model, batches, wanted)
    finally:
        model.train(training)
