"""Static scales: what the learner's linears read and its attention caches on prompts of the training set, each time."""

from itertools import groupby

import torch

from rlq.formats.schemes import Scheme
from rlq.recipes.base import needs
from rlq.recipes.statistics import Statistics, collect

from ..view import Learner
from .prompts import first_prompts

LONGEST = 512
"""Tokens of a prompt that are looked at."""


def calibrate(learner: Learner, scheme: Scheme) -> Statistics | None:
    """Statistics of the learner as it is, as `snapshot` takes them; None if neither scheme nor recipes read any.

    The same prompts every time, so that a resumed run publishes what it would have published. All ranks enter, because
    a sharded model computes on all of them.

    Raises:
        ConfigError: something that is not finite.
    """
    wanted = needs(scheme)
    if not wanted:
        return None
    model = learner.policy
    prompts = first_prompts(learner, learner.args.calibration_prompts, LONGEST)
    by_length = groupby(sorted(prompts, key=len), len)  # a batch without padding
    batches = [torch.tensor(list(group), device=learner.accelerator.device) for _, group in by_length]
    training = model.training
    model.eval()
    try:
        return collect(model, batches, wanted)
    finally:
        model.train(training)
