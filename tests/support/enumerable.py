"""A policy small enough to enumerate: the exact bias and variance of a correction, without sampling anything.

The policy is a table of logits, one row per prefix, over V tokens and sequences of T; the sampler's table is the
learner's plus Gaussian noise, as large as gives the wanted KL per token.

Axes: B = V^T sequences, T tokens, D logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlq.bridge.correct import correct
from rlq.bridge.correction.correction import Correction

GAPS = {"fp8": 0.0195, "int8": 0.027, "nvfp4": 0.25}
"""KL per token between a 16-bit model and its W8A8 or W4A4 copy, nats: measured once on a 0.5 B instruct model."""


@dataclass(frozen=True)
class GradientBias:
    """How far a corrected policy gradient is from the true one, in units of the true gradient's norm."""

    bias: float
    """Norm of (expected estimate - true gradient)."""
    deviation: float
    """Standard deviation of the estimate from one sequence: sqrt of the trace of its covariance."""


def gradient_bias(
    correction: Correction, kl: float, *, vocabulary: int = 4, length: int = 4, seed: int = 0
) -> GradientBias:
    """Exact bias and deviation of the policy-gradient estimate g(y) = sum_t w_t (r(y) - E r) grad log pi(y_t).

    Both are sums over all V^T sequences weighted by their probability under the sampler. Plain sequence importance
    weights have bias 0. Corrections that look at statistics of a batch have no meaning here.

    Args:
        correction: what turns ratios into weights.
        kl: KL(sampler || learner) per token, nats.
        vocabulary: V.
        length: T.
        seed: of the policy, the sampler's noise and the rewards.
    """
    generator = torch.Generator().manual_seed(seed)
    prefixes = sum(vocabulary**t for t in range(length))
    learner = torch.randn(prefixes, vocabulary, generator=generator, dtype=torch.float64)
    noise = torch.randn(prefixes, vocabulary, generator=generator, dtype=torch.float64)
    rows, tokens = _enumerate(vocabulary, length)
    reward = torch.rand(len(rows), generator=generator, dtype=torch.float64)

    def logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)[rows, tokens]

    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        sampler_lp = logprobs(learner + middle * noise)
        found = (sampler_lp.sum(-1).exp() * (sampler_lp - logprobs(learner)).sum(-1)).sum() / length
        low, high = (middle, high) if found < kl else (low, middle)
    learner_lp, sampler_lp = logprobs(learner), logprobs(learner + high * noise)

    probability = learner_lp.sum(-1).exp()
    advantage = reward - (probability * reward).sum()
    out = correct(learner_lp, sampler_lp, torch.ones_like(rows, dtype=torch.bool), correction, advantages=advantage)
    score = _scores(learner, rows, tokens)
    true = torch.einsum("b,btd->d", probability * advantage, score)
    estimate = torch.einsum("bt,btd->bd", out.weights * advantage[:, None], score)
    sampled = sampler_lp.sum(-1).exp()[:, None]
    mean = (sampled * estimate).sum(0)
    variance = (sampled * (estimate - mean).square()).sum()
    return GradientBias(float((mean - true).norm() / true.norm()), float(variance.sqrt() / true.norm()))


def _enumerate(vocabulary: int, length: int) -> tuple[Tensor, Tensor]:
    """(B, T) row of the logit table and token, for every sequence."""
    tokens = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).view(-1, length)
    rows: list[Tensor] = []
    start = 0
    index = torch.zeros(len(tokens), dtype=torch.long)
    for t in range(length):
        rows.append(start + index)
        start += vocabulary**t
        index = index * vocabulary + tokens[:, t]
    return torch.stack(rows, dim=1), tokens


def _scores(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """(B, T, D) gradient of log pi(y_t) with respect to all logits: one-hot minus probabilities, in one row."""
    batch, length = rows.shape
    scores = torch.zeros(batch, length, *logits.shape, dtype=logits.dtype)
    b, t = torch.arange(batch)[:, None], torch.arange(length)[None]
    scores[b, t, rows] = -logits.softmax(-1)[rows]
    scores[b, t, rows, tokens] += 1
    return scores.flatten(2)
