"""Log-probs of tokens under a model's logits."""

import torch


def log_distribution(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (..., V) in nats, fp32, of the tempered distribution: log softmax(logits / temperature)."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def pick(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The entries (...) of log-probs (..., V) at token ids (...)."""
    return log_p.gather(-1, ids[..., None])[..., 0]


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (...) in nats, fp32, of token ids (...) under logits (..., V) at a temperature."""
    return pick(log_distribution(logits, temperature), ids)
