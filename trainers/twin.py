"""The learner as the samplers see it: a copy with dequantized weights and rounded activations, and scores under it.

Axes: B completions, P prompt tokens (padded left), T completion tokens (padded right).
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlq.emulate.model import emulate
from rlq.emulate.scores import log_distribution, pick
from rlq.formats.schemes import Scheme

SEQUENCES_AT_ONCE = 32
"""Bounds the logits in memory."""


def empty_twin(config: Any, scheme: Scheme) -> Any:
    """A model on the CPU, in fp32, that computes what a sampler of `scheme` computes once a snapshot is loaded."""
    # Built anew: TRL has replaced the learner's forward, and a copy of that would still call the original.
    with torch.random.fork_rng():  # a new model draws initial weights; the run's random numbers must not notice
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False).eval()
    emulate(model, scheme)
    return model


def score(model: Any, out: dict[str, torch.Tensor], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the completions of a TRL batch, in fp32, teacher-forced, a few sequences at a time; no gradients."""
    with torch.no_grad():
        return differentiable_score(model, out, temperature)


def differentiable_score(
    model: Any, out: dict[str, torch.Tensor], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `score`, with gradients.

    Returns:
        Log-probs (B, T) of the tokens and entropies (B, T) of the distributions they were drawn from, in nats.
    """
    ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
    attention = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    length = out["completion_ids"].shape[1]
    logprobs, entropies = [], []
    for part in torch.arange(len(ids)).split(SEQUENCES_AT_ONCE):
        logits = model(input_ids=ids[part], attention_mask=attention[part], position_ids=positions[part]).logits
        log_p = log_distribution(logits[:, -length - 1 : -1], temperature)
        logprobs.append(pick(log_p, out["completion_ids"][part]))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)
