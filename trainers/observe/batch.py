"""What observers look at: a generation batch after the bridge, and the rewards it got.

Axes: B completions on this rank, T completion tokens (padded).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlq.bridge import BridgeOutput


@dataclass(frozen=True)
class ScoredBatch:
    """A generation batch after the bridge."""

    out: dict[str, Any]
    """TRL's tensors: prompt_ids, completion_ids, their masks, advantages."""
    learner: torch.Tensor
    """(B, T) `old_logprobs`."""
    sampler: torch.Tensor
    """(B, T) `sampler_logprobs`."""
    mask: torch.Tensor
    """(B, T) bool."""
    bridge: BridgeOutput
    """What the bridge made of them."""

    def first(self, count: int) -> "ScoredBatch":
        """The first `count` completions; `bridge` stays that of the whole batch."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        out = {name: self.out[name][:count] for name in names}
        return ScoredBatch(out, self.learner[:count], self.sampler[:count], self.mask[:count], self.bridge)


class RewardTap:
    """A reward function that remembers what it returned, for dumps and the bias audit."""

    def __init__(self, function: Callable[..., Sequence[float | None]]):
        functools.update_wrapper(self, function)
        self.function = function
        self.values: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None]:
        """Call and remember."""
        result = self.function(*args, **kwargs)
        self.values = [float("nan") if value is None else float(value) for value in result]
        return result


def total_reward(taps: Sequence[RewardTap]) -> torch.Tensor:
    """(B,) sum of what the reward functions returned last; a missing reward counts as 0."""
    return torch.tensor([tap.values for tap in taps], dtype=torch.float64).nansum(0)
