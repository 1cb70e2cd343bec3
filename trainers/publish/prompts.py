"""The first prompts of the training set, which calibration and canary look at."""

from ..view import Learner


def first_prompts(learner: Learner, count: int, longest: int) -> list[list[int]]:
    """Token ids of the first `count` prompts of the training set, each cut to `longest`."""
    return [prompt[:longest] for prompt in learner.first_prompts(count)]
