"""The canary: a few fixed prompts whose log-probs show whether an engine multiplies with what was published."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import SamplerError
from .scores import token_logprobs


class ScoreCheck(Protocol):
    """What a sampler is asked and how its answer is judged."""

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids to score."""
        ...

    def check(self, scores: Sequence[tuple[float, ...]]) -> float:
        """Mean difference in nats; SamplerError if it is too large. May wait for the scores to compare with."""
        ...


@dataclass(frozen=True)
class Probe:
    """Fixed prompts, scored by the dequantized learner."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    logprobs: tuple[tuple[float, ...], ...]
    """Expected log-probs in nats, at temperature 1, of every token of each prompt but its first."""
    tolerance: float
    """Largest acceptable mean of |expected - found| over all tokens, in nats."""

    def check(self, scores: Sequence[tuple[float, ...]]) -> float:
        """Compare an engine's scores with the expected ones.

        Returns:
            Mean of |expected - found| in nats.

        Raises:
            SamplerError: it exceeds the tolerance, or is no number.
        """
        pairs = [
            (a, b)
            for expected, found in zip(self.logprobs, scores, strict=True)
            for a, b in zip(expected, found, strict=True)
        ]
        mean = sum(abs(a - b) for a, b in pairs) / len(pairs)
        if not mean <= self.tolerance:
            raise SamplerError(
                f"the canary is {mean:.3g} nats per token off, more than {self.tolerance:g}: the engine does not "
                "compute with what was published"
            )
        return mean


@torch.no_grad()
def teacher_forced(model: Any, prompts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    """Score prompts with a transformers model: log-probs in nats, fp32, of every token but each prompt's first."""
    scores = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        scores.append(tuple(token_logprobs(model(input_ids=ids).logits[0, :-1], ids[0, 1:]).tolist()))
    return scores
